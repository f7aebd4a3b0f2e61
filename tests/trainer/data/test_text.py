"""Text for training: splits, the built-in corpus, vocabularies and lanes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.base.errors import TextError
from runtimes.contract.vocabulary import decode
from trainer.data.text import Splits, built_in_corpus, lanes, learn_words, load_splits


def split(folder: Path, data: bytes, *, as_bytes: bool = False) -> Splits:
    (folder / "text.txt").write_bytes(data)
    return load_splits(str(folder / "text.txt"), as_bytes=as_bytes)


@settings(max_examples=25)
@given(text=st.text(st.sampled_from("aé€😀\n"), min_size=1, max_size=200))
def test_splits_cover_the_text_exactly_on_whole_characters(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = text.encode("utf-8")
    splits = split(tmp_path_factory.mktemp("text"), data)
    assert splits.train + splits.valid + splits.test == data
    for part in (splits.train, splits.valid, splits.test):
        part.decode("utf-8")
    for end, percent in ((len(splits.train), 90), (len(splits.train + splits.valid), 95)):
        assert 0 <= end - len(data) * percent // 100 <= 3  # moved on to the next character, no further


def test_continuation_bytes_are_still_split(tmp_path: Path) -> None:
    splits = split(tmp_path, b"\x80" * 1000, as_bytes=True)
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [903, 50, 47]


def test_the_built_in_corpus_is_long_english() -> None:
    words = built_in_corpus().decode("utf-8").lower().split()
    assert len(words) > 50_000
    common = sum(word in {"the", "of", "a", "is", "to", "and", "in", "that", "for", "as"} for word in words)
    assert common / len(words) > 0.15


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(TextError) as caught:
            load_splits(str(path))
        for word in (f"--text is {path}, which", *words):
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    (tmp_path / "folder").mkdir()
    prepare = f"xl-export prepare NAME --from {tmp_path}"
    refused(tmp_path / "folder", "is a folder", prepare)
    (tmp_path / "folder/data.json").write_text("{}")
    refused(tmp_path / "folder", "is a dataset", f"--data {tmp_path}")
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        archive.writestr("text.txt", "text")
    refused(tmp_path / "text.zip", "is a zip file and no text", prepare)
    for module in (gzip, bz2, lzma):
        path = tmp_path / f"text.{module.__name__}"
        path.write_bytes(module.compress(b"text"))
        refused(path, f"is a {'xz' if module is lzma else module.__name__} file", prepare)
    np.save(tmp_path / "ids.npy", np.arange(9))
    refused(tmp_path / "ids.npy", "is a npy file and no text", "prepare tokens")
    (tmp_path / "near.txt").write_text("BZh9 starts this text as it starts a bz2 file")
    assert load_splits(str(tmp_path / "near.txt")).train.startswith(b"BZh9")


@pytest.mark.parametrize(
    ("min_count", "words"),
    [
        (1, ["<unk>", "<eos>", "the", "cat", "sat"]),
        (2, ["<unk>", "<eos>", "the", "cat"]),
        (9, ["<unk>", "<eos>"]),
    ],
)
def test_word_vocabulary_keeps_words_of_min_count_most_frequent_first(
    min_count: int, words: list[str]
) -> None:
    vocab = learn_words(["the cat the cat\nthe ", "sat the"], min_count=min_count)
    assert vocab.to_json()["symbols"] == words
    the = "the" if "the" in words else "<unk>"
    assert decode(vocab, vocab.encode("the dog\n")) == f"{the} <unk>\n"  # `dog` is held out


@settings(max_examples=25)
@given(length=st.integers(1, 300), batch=st.integers(1, 9), segment=st.integers(1, 40))
def test_lanes_are_contiguous_equal_parts_in_order_or_refused(length: int, batch: int, segment: int) -> None:
    tokens = np.arange(length)
    if length // batch < segment + 1:
        with pytest.raises(
            TextError, match=rf"{length} tokens, too few for {batch} lanes of more than {segment}"
        ):
            lanes(tokens, batch, segment)
        return
    result = lanes(tokens, batch, segment)
    assert result.shape == (batch, length // batch)
    assert np.array_equal(result.ravel(), tokens[: result.size])
