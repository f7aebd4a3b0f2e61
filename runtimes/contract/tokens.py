"""The tokens to measure a model on: a text, a file of token ids, or the test part of a prepared dataset."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtimes.base.errors import MissingPackageError, TextError
from runtimes.base.files import read_bytes, read_json
from runtimes.base.kinds import DATA as DATA
from runtimes.base.records import json_text
from runtimes.base.text import text_pieces
from runtimes.contract.id_files import ID_SUFFIXES, documents, open_ids, refuse_outside
from runtimes.contract.spec import VOCAB
from runtimes.contract.vocabulary import ByteVocab, Vocab, decode, load_vocab

MAX_SIDE_BYTES = 1 << 12


@dataclass(frozen=True)
class ReadText:
    """A text as the ids of a vocabulary."""

    tokens: np.ndarray  # ids [N]; memory-mapped if they come from a file
    text: str | None = None  # what the ids encode; None for bytes and for ids


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """How much text some tokens are, which makes models of different vocabularies comparable."""

    characters: int
    num_bytes: int


def read_tokens(path: Path, vocab: Vocab, *, ids: bool = False, dtype: str | None = None) -> np.ndarray:
    """The token ids [N] of `read_text`."""
    return read_text(path, vocab, ids=ids, dtype=dtype).tokens


def read_text(path: Path, vocab: Vocab, *, ids: bool = False, dtype: str | None = None) -> ReadText:
    """The tokens of a text, of a file of ids, or of the test part of a prepared dataset.

    A text is decoded as `runtimes.base.text` says, except for a byte vocabulary, which uses its bytes.

    path: `-` is the text of standard input.
    ids: the file holds ids of this vocabulary: `.npy`, raw `.bin` of the type `dtype`, or `.jsonl`. The lines
    of a `.jsonl` file and the rows of a two-dimensional array are documents, each followed by the token for
    the end of a document. Without `ids` a `.npy` file is accepted only if a side file (see `side_file`) says
    that its vocabulary is this one, or if the model only knows ids. A dataset must have the model's
    vocabulary.

    Raises UserError for a file that cannot be read, TextError for one that is not text of this vocabulary,
    holds something else than integers, or has ids that the vocabulary lacks.
    """
    if str(path) == "-":
        return _standard_input(vocab, ids=ids, dtype=dtype)
    if (path / DATA).is_file():
        if ids or dtype is not None:
            raise TextError(
                f"{path} is a dataset, which says itself what it holds; leave out --ids and --dtype."
            )
        return ReadText(_test_part(path, vocab))
    suffix = path.suffix.lower()
    if ids or suffix == ".npy" or (vocab.kind == "ids" and suffix in ID_SUFFIXES):
        return ReadText(_read_ids(path, vocab, declared=ids, dtype=dtype))
    if suffix in ID_SUFFIXES and vocab.kind != "byte":  # numbers would be scored as if they were words
        raise TextError(
            f"{path} has the name of a file of token ids; give --ids if it holds ids of this model, or give "
            "a text file of another name."
        )
    if dtype is not None:
        raise TextError(f"--dtype is {dtype} and {path} is read as text; give --ids for a file of ids.")
    return _encoded(read_bytes(path), vocab, name=str(path))


def _encoded(raw: bytes, vocab: Vocab, *, name: str) -> ReadText:
    """A text and its tokens; raises TextError, which names the text, if the vocabulary lacks a part."""
    text = None if isinstance(vocab, ByteVocab) else "".join(text_pieces([raw], name))
    try:
        return ReadText(vocab.encode(raw if text is None else text), text)
    except TextError as error:
        raise TextError(f"{name}: {error}") from error


def _standard_input(vocab: Vocab, *, ids: bool, dtype: str | None) -> ReadText:
    if ids or dtype is not None:
        raise TextError(
            "standard input is read as text, and token ids are read only from a file; give a file with "
            "--ids, or leave out --ids and --dtype."
        )
    return _encoded(sys.stdin.buffer.read(), vocab, name="standard input")


def predicted_size(text: ReadText, vocab: Vocab) -> TextSize | None:
    """The size of the text without its first token, which is never predicted; None for a vocabulary of ids.

    For ids of a vocabulary that has text, it is the size of what they decode to, without the tokens that
    separate documents. It is None if the library that decodes them is not installed.
    """
    if vocab.kind == "ids" or len(text.tokens) == 0:
        return None
    if isinstance(vocab, ByteVocab):
        values = np.array(vocab.values, np.uint8)[np.asarray(text.tokens[1:])]
        return TextSize(characters=int((values & 0xC0 != 0x80).sum()), num_bytes=len(values))
    try:
        first = _decoded_size(vocab, text.tokens[:1])
        whole = _decoded_size(vocab, text.tokens) if text.text is None else _size(text.text)
    except MissingPackageError:
        return None
    return TextSize(
        characters=whole.characters - first.characters, num_bytes=whole.num_bytes - first.num_bytes
    )


def _size(text: str) -> TextSize:
    return TextSize(characters=len(text), num_bytes=len(text.encode()))


def _decoded_size(vocab: Vocab, tokens: np.ndarray) -> TextSize:
    special = vocab.special
    marks = [special.end_of_document, special.beginning, special.first, special.padding]
    without_text = {token for token in marks if token is not None and token != special.end_of_line}
    text = decode(vocab, (token for token in tokens.tolist() if token not in without_text))
    characters = len(text)
    num_bytes = len(text.encode("utf-8", errors="surrogatepass"))
    return TextSize(characters=characters, num_bytes=num_bytes)


def side_file(ids: str) -> str:
    """The name of the file next to a file of ids that names their vocabulary: `test.json` for `test.npy`."""
    return str(Path(ids).with_suffix(".json"))


def vocabulary_sha256(vocab: Vocab) -> str:
    """Hexadecimal SHA-256 of a vocabulary; the order of the keys in its file does not matter."""
    return hashlib.sha256(json_text(vocab.to_json(), sort_keys=True).encode()).hexdigest()


def side_bytes(vocab: Vocab) -> bytes:
    """The content of a side file: the SHA-256 of the vocabulary, as JSON."""
    return (json_text({"vocabulary_sha256": vocabulary_sha256(vocab)}) + "\n").encode()


def unknown_share(vocab: Vocab, tokens: np.ndarray) -> float | None:
    """The share of `tokens` that are the token for unknown symbols; None if the vocabulary has no such
    token.
    """
    unknown = vocab.special.unknown
    return None if unknown is None else float(np.mean(np.asarray(tokens) == unknown))


def _read_ids(path: Path, vocab: Vocab, *, declared: bool, dtype: str | None) -> np.ndarray:
    """The ids of a file, which are known to be of this vocabulary."""
    fix = "give ids of this model"
    if path.suffix == ".jsonl":
        return _joined(path, vocab, dtype, fix)
    ids = open_ids(path, dtype=dtype)
    side = path.with_name(side_file(path.name))
    side_facts = side.read_bytes() if side.is_file() and side.stat().st_size < MAX_SIDE_BYTES else b""
    if b'"vocabulary_sha256"' in side_facts and side_facts != side_bytes(vocab):
        raise TextError(
            f"{path} has ids of another vocabulary than the model's, as {side} says; give ids of the "
            "model's vocabulary, or a text."
        )
    if not declared and b'"vocabulary_sha256"' not in side_facts and vocab.kind != "ids":
        raise TextError(
            f"{path} holds token ids, and nothing says that they are ids of this model's vocabulary of "
            f"{vocab.size} {vocab.kind}s; give --ids if they are (`eval` and `recl` have it), or give a text."
        )
    if ids.ndim == 2:
        return _joined(path, vocab, dtype, fix)
    refuse_outside(ids, path, vocab.size, fix=fix)
    return ids


def _joined(path: Path, vocab: Vocab, dtype: str | None, fix: str) -> np.ndarray:
    """The documents of a file in one, each followed by the token for the end of a document, as in
    training. A document that ends with that token has it already.
    """
    end = vocab.special.end_of_document
    pieces: list[np.ndarray] = []
    for document in documents(path, dtype=dtype):
        if len(document) == 0:
            continue
        if pieces and end is None:
            raise TextError(
                f"{path} has several documents and this model's vocabulary has no token for the end of a "
                "document; give one list of ids, or score each with `xl-export score`."
            )
        refuse_outside(document, path, vocab.size, fix=fix)
        pieces.append(np.asarray(document, np.int64))
        if end is not None and document[-1] != end:
            pieces.append(np.array([end], np.int64))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def _test_part(folder: Path, vocab: Vocab) -> np.ndarray:
    facts = read_json(folder / DATA)
    path = folder / "test.bin"
    dtype = facts.get("dtype") if isinstance(facts, dict) else None
    size = path.stat().st_size if path.is_file() else 0
    if dtype not in ("uint8", "uint16", "int32") or size == 0 or size % np.dtype(dtype).itemsize:
        raise TextError(
            f"{folder} is a damaged dataset: its {DATA} and {path.name} do not fit; prepare it again."
        )
    if load_vocab(folder / VOCAB).to_json() != vocab.to_json():
        raise TextError(
            f"{folder} has another vocabulary than the model; give the dataset that it was trained on, or a "
            "text."
        )
    ids = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
    refuse_outside(ids, path, vocab.size, fix="prepare the dataset again")
    return ids
