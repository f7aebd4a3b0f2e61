"""Small files in the formats and under the names of the public corpora, as a folder, a zip or a tar."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import TypeVar

File = TypeVar("File", Path, io.BytesIO)

ENWIK8 = b"<mediawiki>\n  <page>caf\xc3\xa9 \xff</page>\n" + bytes(range(256)) * 20  # any byte, newlines too
TEXT8 = b" anarchism originated as a term of abuse first used against early working class radicals" * 5
WIKI = {
    "train": b" \n = Robert Boulter = \n \n Robert <unk> is an English film film , film \n"
    b" the the the the \n",
    "valid": b" \n = Homarus = \n \n the lobster is an <unk> \n",
    "test": b" \n = Film = \n \n film is the unseen word \n",
}
PTB = {
    "train": b" aer banknote <unk> N years old \n the board as a <unk> director N \n",
    "valid": b" consumers N years \n",
    "test": b" no it was n't N \n",
}
SHARDS = {  # each sentence once, shuffled over the shards; two words are seen three times and more
    "training-monolingual.tokenized.shuffled/news.en-00002-of-00100": b"The cat saw The dog .\n"
    b"The caf\xc3\xa9 was open .\n",
    "training-monolingual.tokenized.shuffled/news.en-00001-of-00100": b"rare The cat . cat\n. dog\n",
    "training-monolingual.tokenized.shuffled/news.en-00010-of-00100": b"cat .\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": b"The unseen cat .\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050": b"cat .\nThe .\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00002-of-00050": b"not this shard\n",
    "heldout-monolingual.tokenized.shuffled/news.en-00000-of-00100": b"not this shard either\n",
    "README": b"about",
}

PUBLISHED = {  # member names as in the published archives
    "enwik8": {"enwik8": ENWIK8},
    "text8": {"text8": TEXT8},
    "wikitext-103": {f"wikitext-103/wiki.{part}.tokens": data for part, data in WIKI.items()},
    "penn-treebank": {f"./simple-examples/data/ptb.{part}.txt": data for part, data in PTB.items()}
    | {f"./simple-examples/data/ptb.char.{part}.txt": b"c h a r" for part in PTB},
    "one-billion-word": {
        f"1-billion-word-language-modeling-benchmark-r13output/{name}": data for name, data in SHARDS.items()
    },
}


def make_folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, data in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def make_zip(to: File, members: dict[str, bytes], *, kind: int = zipfile.ZIP_DEFLATED) -> File:
    with zipfile.ZipFile(to, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return to


def make_tar(to: File, members: dict[str, bytes], *, mode: str = "w:gz") -> File:
    path, stream = (to, None) if isinstance(to, Path) else (None, to)
    with tarfile.open(path, mode, stream) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return to


def make_source(folder: Path, name: str, form: str) -> Path:
    """The small corpus `name` as a `folder`, `zip`, `tar` or `tar.gz` inside `folder`."""
    folder.mkdir(exist_ok=True)
    if form == "folder":
        return make_folder(folder / "files", PUBLISHED[name])
    if form == "zip":
        return make_zip(folder / f"{name}.zip", PUBLISHED[name])
    return make_tar(folder / f"{name}.{form}", PUBLISHED[name], mode="w" if form == "tar" else "w:gz")
