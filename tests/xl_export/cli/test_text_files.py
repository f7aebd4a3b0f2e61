"""The same text gives the same result however its file was saved, at every place that reads a text file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import trainer
from runtimes.base.errors import UserError
from runtimes.cli.lines import read_prompts
from runtimes.contract.tokens import read_text, read_tokens
from runtimes.contract.vocabulary import ByteVocab, CharVocab, IdsVocab, WordVocab, vocab_from_file
from tests.commands import json_of, refused, xl
from trainer.data.dataset import open_dataset
from trainer.data.own import OwnFiles
from trainer.data.own_ids import ids_vocab, prepare_ids
from trainer.data.own_text import Documents, learn_vocab, prepare_text
from trainer.data.source import load_source
from trainer.run.config import TrainConfig
from xl_export.cli.main import main
from xl_export.importers.fairseq import read_dictionary
from xl_export.importers.shared.settings import read_settings
from xl_export.importers.shared.vocabularies import read_vocabulary
from xl_export.offline.corpus import blocks_of, texts_of
from xl_export.serve.http.base.keys import hashed, read_keys

BOM = b"\xef\xbb\xbf"
KEY = "anna-has-a-long-key"
CHARS = CharVocab(sorted(set("abcdefghijklmnopqrstuvwxyz \n")))
WORDS = WordVocab(["<unk>", "<eos>", "the", "king"])
LINES = "the king\nwas old\n\nthe dog\n"
JSON_LINES = '{"text": "the king"}\n{"text": "was old"}\n'
IDS = "1 2 3\n4 5 6\n"
TINY = Path(trainer.__file__).parent / "configs/small/tiny.json"


def train(path: Path, vocab: str) -> Any:
    source = load_source(dataclasses.replace(TrainConfig.load("tiny"), text=str(path), vocab=vocab))
    return source.digest, source.held_out, source.files, source.vocab.to_json()


def prepare(path: Path, vocab: str, documents: Documents) -> Any:
    files = OwnFiles(train=[path], valid=[path], test=[path])
    out = path.parent / "dataset"
    prepare_text(files, out, vocab=vocab, documents=documents, force=True)
    dataset = open_dataset(out)
    return dataset.vocab.to_json(), dataset.train.tolist()


def prepare_tokens(path: Path) -> Any:
    vocab = ids_vocab(9, names=None, end_of_document=0)
    files, out = OwnFiles(train=[path], valid=[path], test=[path]), path.parent / "dataset"
    prepare_ids(files, out, vocab=vocab, force=True)
    return open_dataset(out).train.tolist()


def names(path: Path) -> Any:
    return ids_vocab(None, names=path, end_of_document=None).names


def learn(path: Path, kind: Any, size: int | None) -> Any:
    return learn_vocab(kind, [path], path.with_name("vocab.json"), size=size).to_json()


def keys(path: Path) -> Any:
    name = read_keys(path).get(hashed(KEY.encode()))
    assert name is not None
    return name


def text_and_tokens(path: Path) -> Any:
    read = read_text(path, CHARS)
    return read.text, read.tokens.tolist()


def vocab_of(path: Path) -> Path:
    path.with_name("vocab.json").write_text(json.dumps(WORDS.to_json()))
    return path.with_name("vocab.json")


def prompts_of(path: Path) -> Any:
    return read_prompts([], [], path, vocab=CHARS)


def corpus(path: Path) -> Any:
    return [text.text for block in blocks_of(str(path), None, 9) for text in texts_of(block)]


@dataclass(frozen=True)
class Entry:
    """A place that reads a text file: what it makes of the content of a file at a path."""

    read: Callable[[Path], Any]
    content: str
    suffix: str = ".text"


NAMED = IdsVocab(3, names=["the", "king", "old"])
ENTRIES = {
    "eval, characters": Entry(text_and_tokens, LINES),
    "eval, words": Entry(lambda path: read_tokens(path, WORDS).tolist(), LINES),
    "eval, names": Entry(lambda path: read_tokens(path, NAMED).tolist(), "the king\nold\n"),
    "eval --ids": Entry(lambda path: read_tokens(path, CHARS, ids=True).tolist(), IDS, ".txt"),
    "train, characters": Entry(lambda path: train(path, "char"), LINES * 500),
    "train, words": Entry(lambda path: train(path, "word"), LINES * 500),
    "prepare text, characters": Entry(lambda path: prepare(path, "char", "file"), LINES),
    "prepare text, words": Entry(lambda path: prepare(path, str(vocab_of(path)), "file"), LINES),
    "prepare text, lines": Entry(lambda path: prepare(path, "char", "line"), LINES),
    "prepare text, JSON": Entry(lambda path: prepare(path, "byte", "jsonl"), JSON_LINES),
    "prepare vocab, words": Entry(lambda path: learn(path, "word", None), LINES),
    "prepare vocab, subwords": Entry(lambda path: learn(path, "byte-bpe", 270), LINES),
    "prepare tokens, numbers": Entry(prepare_tokens, IDS, ".txt"),
    "prepare tokens, JSON": Entry(prepare_tokens, "[1, 2]\n[3]\n", ".jsonl"),
    "prepare tokens --names": Entry(names, "do\nre\nmi\n"),
    "prepare tokens --names, JSON": Entry(names, '["do",\n"re"]\n'),
    "import --vocab, list": Entry(
        lambda path: read_vocabulary(path, size=3).vocab.to_json(), "<eos>\nthe\nking\n", ".txt"
    ),
    "import --vocab, fairseq": Entry(
        lambda path: read_dictionary(path, size=6).vocab.to_json(), "the 7\nking 3\n", ".txt"
    ),
    "import --vocab, JSON": Entry(
        lambda path: vocab_from_file(path).to_json(), '{\n"kind": "char",\n"symbols": ["a", "b"]}\n', ".json"
    ),
    "import --settings": Entry(read_settings, '{"mem_len": 3,\n"tgt_len": 4}\n'),
    "train CONFIG": Entry(TrainConfig.load, TINY.read_text("utf-8")),
    "serve --api-keys": Entry(keys, f"# keys\nanna {KEY}\n"),
    "generate --prompts": Entry(prompts_of, LINES),
    "score on Ray": Entry(corpus, LINES),
}


def saved(text: str) -> dict[str, bytes]:
    """A text in UTF-8, as several programs save it."""
    plain, windows = text.encode(), text.replace("\n", "\r\n").encode()
    return {"LF": plain, "CRLF": windows, "BOM": BOM + plain, "BOM+CRLF": BOM + windows}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
def test_the_same_text_gives_the_same_result(entry: Entry, tmp_path: Path) -> None:
    results = {}
    for name, content in saved(entry.content).items():
        path = (tmp_path / "input").with_suffix(entry.suffix)
        path.write_bytes(content)
        results[name] = repr(entry.read(path))
    assert results == dict.fromkeys(results, results["LF"])


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
def test_another_encoding_is_refused_with_the_file(entry: Entry, tmp_path: Path) -> None:
    path = (tmp_path / "input").with_suffix(entry.suffix)
    for encoding in ("UTF-16", "Latin-1"):
        path.write_bytes((entry.content + "é").encode(encoding))
        with pytest.raises(UserError, match=rf"{path} is not UTF-8 .*but probably {encoding}"):
            entry.read(path)


def test_commands_read_standard_input_as_they_read_a_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    figures = []
    for content in saved("The king was old.\nThe dog ran.\n").values():
        path.write_bytes(content)
        for source in (str(path), "-"):
            command = ["eval", str(run), "--text", source, "--json"]
            document = json_of(CliRunner().invoke(main, command, input=content))
            scored = CliRunner().invoke(main, ["score", str(run), "--input", source], input=content)
            figures.append((document["nats_per_token"], document["characters"], scored.stdout))
    assert figures == figures[:1] * len(figures)
    other = CliRunner().invoke(main, ["eval", str(run), "--text", "-"], input="The king".encode("utf-16"))
    refused(other, "standard input is not UTF-8 but probably UTF-16; convert it")


def test_a_changed_text_has_one_note(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(saved("The king\n")["BOM+CRLF"])
    evaluated = xl("eval", run, "--text", tmp_path / "a.txt", "--mem-len", "4,8")
    assert evaluated.stderr.count("note: ") == 1
    assert "a.txt: its byte order mark is left out and its Windows line ends" in evaluated.stderr


def test_a_byte_vocabulary_takes_a_file_as_it_is(tmp_path: Path) -> None:
    content = BOM + b"caf\xe9\r\n" * 400
    (tmp_path / "input").write_bytes(content)
    (tmp_path / "bytes.json").write_text(json.dumps(ByteVocab().to_json()))
    assert bytes(read_tokens(tmp_path / "input", ByteVocab()).astype(np.uint8)) == content
    assert bytes(prepare(tmp_path / "input", "byte", "file")[1]) == content
    for vocab in ("byte", str(tmp_path / "bytes.json")):
        files = train(tmp_path / "input", vocab)[2]
        assert content.endswith(files["valid.txt"] + files["test.txt"])
