"""The tokens to measure a model on: a text, a file of token ids, or the test part of a prepared dataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.files import read_bytes, read_json
from runtimes.base.sealed import identity_of
from runtimes.contract.id_files import open_ids
from runtimes.contract.spec import VOCAB
from runtimes.contract.vocabulary import Vocab, WordVocab, load_vocab

DATA = "data.json"  # marks a prepared dataset (`trainer/data/dataset.py`)
MAX_SIDE_BYTES = 1 << 12


def read_tokens(path: Path, vocab: Vocab) -> np.ndarray:
    """The token ids [N] of a text, of a `.npy` file of ids, or of the test part of a prepared dataset.

    Ids in files are memory-mapped. The vocabulary of a dataset must be that of the model. So must the
    vocabulary of a `.npy` file, where a side file (see `side_file`) tells it.

    Raises UserError for a file that cannot be read, TextError for one that is not text of this vocabulary,
    not a one-dimensional array of integers, or has ids that the vocabulary lacks.
    """
    if (path / DATA).is_file():
        return _test_part(path, vocab)
    return _mapped_ids(path, vocab) if path.suffix == ".npy" else vocab.encode(read_bytes(path))


def side_file(ids: str) -> str:
    """The name of the file next to a file of ids that tells their vocabulary: `test.json` for `test.npy`."""
    return str(Path(ids).with_suffix(".json"))


def side_bytes(vocab: Vocab) -> bytes:
    """The content of a side file: the SHA-256 of the vocabulary, as JSON."""
    return (json.dumps({"vocabulary_sha256": identity_of(vocab.to_json())}) + "\n").encode()


def unknown_share(vocab: Vocab, tokens: np.ndarray) -> float | None:
    """The share of `tokens` that are the token for unknown words; None where the vocabulary has no such
    token.
    """
    if not isinstance(vocab, WordVocab) or vocab.unknown not in vocab.symbols:
        return None
    return float(np.mean(tokens == vocab.symbols.index(vocab.unknown)))


def _mapped_ids(path: Path, vocab: Vocab) -> np.ndarray:
    ids = open_ids(path)
    side = path.with_name(side_file(path.name))
    told = side.read_bytes() if side.is_file() and side.stat().st_size < MAX_SIDE_BYTES else b""
    if b'"vocabulary_sha256"' in told and told != side_bytes(vocab):
        raise TextError(
            f"{path} has ids of another vocabulary than that of the model, as {side} says; give ids of the "
            "model's vocabulary, or a text."
        )
    return _in_range(ids, path, vocab)


def _test_part(folder: Path, vocab: Vocab) -> np.ndarray:
    facts, path = read_json(folder / DATA), folder / "test.bin"
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
    return _in_range(np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r"), path, vocab)


def _in_range(ids: np.ndarray, path: Path, vocab: Vocab) -> np.ndarray:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab.size):
        outside = ids.max() if ids.max() >= vocab.size else ids.min()
        raise TextError(
            f"{path} has the token id {outside}, outside the vocabulary of this model (0 to "
            f"{vocab.size - 1}); prepare it with the vocab.json of this run or artefact."
        )
    return ids
