"""Tokens from a text or from a file of ids."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.errors import TextError, UserError
from runtimes.tokens import read_tokens, unknown_share
from runtimes.vocab import ByteVocab, CharVocab, WordVocab

ABC = CharVocab(["a", "b", "c"])


def test_a_text_is_encoded(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("abca")
    assert read_tokens(tmp_path / "some.txt", ABC).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int64", "uint64", ">u2"])
def test_ids_are_mapped_not_read(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.array([2, 0, 1], dtype))
    ids = read_tokens(tmp_path / "some.npy", ABC)
    assert isinstance(ids, np.memmap)
    assert ids.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([0, 3]), "the token id 3, outside"),
        (np.array([0, -1]), "the token id -1, outside"),
        (np.array([0.0, 1.0]), r"float64 \[2\]"),
        (np.array([[0, 1]]), r"int64 \[1, 2\]"),
        (np.array([True]), r"bool \[1\]"),
        (np.array([{}], object), "could not be read"),
    ],
)
def test_ids_that_do_not_fit_are_refused(array: np.ndarray, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", array, allow_pickle=True)
    with pytest.raises(TextError, match=words):
        read_tokens(tmp_path / "some.npy", ABC)


def test_damaged_files_of_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.npy"
    with pytest.raises(UserError, match="No such file"):
        read_tokens(path, ABC)
    np.save(path, np.zeros(100, np.int64))
    whole = path.read_bytes()
    huge = whole.replace(b"(100,)", b"(9**9,)").replace(b"'fortran_order': False", b"'fortran_order': True ")
    endless = whole[:128].replace(b"(100,),        ", b"(99999999999,),")
    for damaged in (b"", whole[:40], whole[:200], b"PK" + whole, pickle.dumps([1]), huge, endless):
        path.write_bytes(damaged)
        with pytest.raises(TextError, match=r"some\.npy could not be read as a \.npy file") as caught:
            read_tokens(path, ABC)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_ids_from_what_is_not_a_file_are_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "some.npy")
    with pytest.raises(TextError, match=r"some\.npy is not a file"):
        read_tokens(tmp_path / "some.npy", ABC)


def test_the_share_of_unknown_words() -> None:
    vocab = WordVocab(["<unk>", "<eos>", "the"])
    assert unknown_share(vocab, vocab.encode("the cat\nthe the")) == pytest.approx(1 / 5)
    assert unknown_share(WordVocab(["the"]), np.zeros(3)) is None
    assert unknown_share(ABC, np.zeros(3)) is None
    assert unknown_share(ByteVocab(), np.zeros(3)) is None
