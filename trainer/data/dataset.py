"""A dataset: a folder that holds a corpus as token ids in three memory-mapped parts, and its vocabulary.

The folder holds `train.bin`, `valid.bin` and `test.bin` (ids, little-endian, of the smallest type that holds
them), the vocabulary as runs have it, and `data.json`: where it came from, sizes and hashes, and a digest
over all of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from runtimes.base.errors import ArtefactError, TextError, UserError
from runtimes.base.folders import refuse_no_folder
from runtimes.base.ranges import counted
from runtimes.base.sealed import FileFacts, file_facts, read_sealed, write_sealed
from runtimes.contract.id_files import IDS_PER_CHECK
from runtimes.contract.model_facts import MAX_SIZE
from runtimes.contract.spec import VOCAB
from runtimes.contract.tokens import DATA as DATA
from runtimes.contract.vocabulary import VOCAB_FILES, Vocab, load_vocab

SCHEMA = 1  # version of `data.json`
SPLITS = ("train", "valid", "test")
MIN_PART_TOKENS = 2  # one is fed and the other predicted
DType = Literal["uint8", "uint16", "int32"]


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """The content of `data.json`."""

    schema: int = SCHEMA
    corpus: str
    published: bool  # whether the sources are the published files, by size and hash
    dtype: DType
    vocab_size: int
    tokens: dict[str, int]  # number of ids in each part
    files: dict[str, FileFacts]  # hashes and sizes of the files in this folder
    sources: dict[str, FileFacts] = field(default_factory=dict)
    """Hashes and sizes of the files from which it was prepared."""
    identity: str = ""  # SHA-256 of the bytes of `data.json`, which does not hold it

    @property
    def held_out(self) -> str | None:
        """The SHA-256 of the file that the held-out part was made from, the same for every vocabulary.

        If there are several files, or the part was cut from others, it is made of their hashes.
        """
        held_out = {name: source for name, source in self.sources.items() if name.split("/")[0] == "valid"}
        digests = sorted(source.sha256 for source in (held_out or self.sources).values())
        if len(digests) > 1:
            return hashlib.sha256("".join(digests).encode()).hexdigest()
        return digests[0] if digests else None


@dataclass(frozen=True)
class Dataset:
    """A prepared corpus. Its parts are read-only memory-mapped arrays [N] of ids."""

    facts: DatasetFacts
    vocab: Vocab
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def smallest_dtype(vocab_size: int) -> DType:
    """The smallest type that holds every id."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "int32"


def write_part(path: Path, pieces: Iterable[np.ndarray], vocab_size: int) -> None:
    """Writes ids to a file, piece by piece.

    Raises TextError for an id outside the vocabulary, which the file's type could not hold.
    """
    little_endian = np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
    with open(path, "wb") as stream:
        for ids in pieces:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise TextError(
                    f"the vocabulary gives the token id {wrong} for a text and has the ids 0 to "
                    f"{vocab_size - 1}; give another vocabulary."
                )
            stream.write(ids.astype(little_endian).tobytes())


def save_facts(
    folder: Path, vocab: Vocab, *, corpus: str, published: bool, sources: dict[str, FileFacts]
) -> DatasetFacts:
    """Writes `data.json` for the vocabulary and the parts in a folder; returns the facts with their identity.

    Raises UserError for a part in which no token can be predicted.
    """
    dtype = smallest_dtype(vocab.size)
    names = [*(f"{split}.bin" for split in SPLITS), *VOCAB_FILES]
    files = {name: file_facts(folder / name) for name in names if (folder / name).is_file()}
    tokens = {split: files[f"{split}.bin"].num_bytes // np.dtype(dtype).itemsize for split in SPLITS}
    for split, count in tokens.items():
        if count < MIN_PART_TOKENS:
            raise UserError(
                f"the {split} part has {counted(count, 'token')}, too few to predict one; give more."
            )
    facts = DatasetFacts(
        corpus=corpus,
        published=published,
        dtype=dtype,
        vocab_size=vocab.size,
        tokens=tokens,
        files=files,
        sources=sources,
    )
    return write_sealed(folder / DATA, facts)


def open_dataset(path: Path | str) -> Dataset:
    """The dataset in a folder, its token files mapped.

    The digest, the size of every file, the hashes of the vocabulary and the range of all ids are verified.
    Raises ArtefactError that names the file at fault.
    """
    folder = Path(path)
    if not (folder / DATA).is_file():
        refuse_no_folder(folder, give="a prepared dataset")
        raise ArtefactError(
            f"{folder} is not a dataset: it has no {DATA}; make one with `xl-export prepare text` from texts "
            "of your own, `prepare tokens` from token ids, or `prepare NAME --from PATH` of a public corpus."
        )
    facts = _read(folder / DATA)
    for name, expected in facts.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != expected.num_bytes:
            found = "is missing" if size is None else f"has {size:,} bytes, expected {expected.num_bytes:,}"
            raise ArtefactError(f"{folder / name} {found}; copy the dataset again, or prepare it again.")
    for name in facts.files:
        if name in VOCAB_FILES and file_facts(folder / name) != facts.files[name]:
            raise ArtefactError(
                f"{folder / name} was altered: its SHA-256 is not the one in {DATA}; prepare the dataset "
                "again."
            )
    vocab = load_vocab(folder / VOCAB)
    if vocab.size != facts.vocab_size:
        raise ArtefactError(
            f"{folder / VOCAB} has {vocab.size} symbols and {DATA} says {facts.vocab_size}; prepare it again."
        )
    return Dataset(facts, vocab, *(_map(folder / f"{split}.bin", facts, split) for split in SPLITS))


def _read(path: Path) -> DatasetFacts:
    again = "prepare the dataset again"
    facts = read_sealed(DatasetFacts, path, schema=SCHEMA, what="dataset", again=again)
    itemsize = np.dtype(facts.dtype).itemsize
    consistent = (
        facts.schema == SCHEMA
        and 1 <= facts.vocab_size <= MAX_SIZE
        and set(facts.tokens) == set(SPLITS)
        and set(facts.files) - set(VOCAB_FILES) == {f"{split}.bin" for split in SPLITS}
        and VOCAB in facts.files
        and all(
            count >= MIN_PART_TOKENS and facts.files[f"{split}.bin"].num_bytes == count * itemsize
            for split, count in facts.tokens.items()
        )
    )
    if not consistent:
        raise ArtefactError(
            f"{path} contradicts itself or has another schema than {SCHEMA}; prepare the dataset again."
        )
    return facts


def _map(path: Path, facts: DatasetFacts, split: str) -> np.ndarray:
    dtype = np.dtype(facts.dtype).newbyteorder("<")
    ids = np.memmap(path, dtype=dtype, mode="r", shape=(facts.tokens[split],))
    if facts.vocab_size <= np.iinfo(facts.dtype).max:  # otherwise every value of the type is an id
        for start in range(0, len(ids), IDS_PER_CHECK):
            block = ids[start : start + IDS_PER_CHECK]
            if block.max() >= facts.vocab_size or block.min() < 0:
                raise ArtefactError(
                    f"{path} has ids that are not among the {facts.vocab_size} symbols; copy or prepare the "
                    "dataset again."
                )
    return ids
