"""Tokens from a text or from a file of ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import TextError
from runtimes.base.files import write_json
from runtimes.contract.tokens import (
    ReadText,
    TextSize,
    predicted_size,
    read_text,
    read_tokens,
    side_bytes,
    unknown_share,
)
from runtimes.contract.vocabulary import (
    ByteVocab,
    CharVocab,
    IdsVocab,
    SpecialTokens,
    Vocab,
    WordVocab,
)

ABC = CharVocab(["a", "b", "c"])


@pytest.mark.parametrize("dtype", ["uint8", "int64", "uint64", ">u2"])
def test_ids_are_mapped_not_read(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.array([2, 0, 1], dtype))
    ids = read_tokens(tmp_path / "some.npy", ABC, ids=True)
    assert isinstance(ids, np.memmap)
    assert ids.tolist() == [2, 0, 1]


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """`test_id_files.py` has what is no file of ids."""
    for ids, words in (
        ([0, 3], "the token id 3 at index 1, outside"),
        ([0, -1], "the token id -1 at index 1"),
    ):
        np.save(tmp_path / "some.npy", np.array(ids))
        with pytest.raises(TextError, match=words):
            read_tokens(tmp_path / "some.npy", ABC, ids=True)


def test_ids_of_another_vocabulary_are_refused_by_their_side_file(tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.array([2, 0, 1]))
    (tmp_path / "some.json").write_bytes(side_bytes(ABC))
    assert read_tokens(tmp_path / "some.npy", ABC).tolist() == [2, 0, 1]
    with pytest.raises(TextError, match=r"ids of another vocabulary than the model's, as .*some\.json says"):
        read_tokens(tmp_path / "some.npy", CharVocab(["a", "c", "b"]))
    (tmp_path / "some.json").write_text('{"mine": 3}')
    with pytest.raises(TextError, match=r"nothing says that they are ids of this model's .* give --ids"):
        read_tokens(tmp_path / "some.npy", CharVocab(["a", "c", "b"]))
    assert read_tokens(tmp_path / "some.npy", CharVocab(["a", "c", "b"]), ids=True).tolist() == [2, 0, 1]


def test_a_model_without_text_reads_ids_without_an_option(tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.array([2, 0, 1]))
    assert read_tokens(tmp_path / "some.npy", IdsVocab(3)).tolist() == [2, 0, 1]
    (tmp_path / "some.txt").write_text("2 0 1")
    assert read_tokens(tmp_path / "some.txt", IdsVocab(3)).tolist() == [2, 0, 1]
    assert read_tokens(tmp_path / "some.txt", IdsVocab(3), ids=True).tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["some.jsonl", "some.bin", "some.NPY"])
def test_a_file_named_like_ids_is_not_read_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("abc")
    with pytest.raises(TextError, match="ids"):
        read_tokens(tmp_path / name, ABC)
    if name != "some.NPY":
        assert len(read_tokens(tmp_path / name, ByteVocab())) == 3  # any file is bytes


def test_documents_are_joined_by_the_token_that_ends_one(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("[2, 0]\n\n[1]\n")
    ended = IdsVocab(4, special=SpecialTokens(end_of_document=3))
    assert read_tokens(tmp_path / "some.jsonl", ended).tolist() == [2, 0, 3, 1, 3]
    np.save(tmp_path / "rows.npy", np.array([[2, 0], [1, 3]]))
    assert read_tokens(tmp_path / "rows.npy", ended).tolist() == [2, 0, 3, 1, 3]
    (tmp_path / "ended.jsonl").write_text("[2, 0, 3]\n[]\n[1, 3]")
    assert read_tokens(tmp_path / "ended.jsonl", ended).tolist() == [2, 0, 3, 1, 3]
    with pytest.raises(TextError, match="no token for the end of a document"):
        read_tokens(tmp_path / "some.jsonl", IdsVocab(4))


def test_raw_ids_need_their_type(tmp_path: Path) -> None:
    np.array([2, 0, 1], "<u2").tofile(tmp_path / "some.bin")
    assert read_tokens(tmp_path / "some.bin", ABC, ids=True, dtype="uint16").tolist() == [2, 0, 1]
    with pytest.raises(TextError, match="say what they are with --dtype"):
        read_tokens(tmp_path / "some.bin", ABC, ids=True)
    (tmp_path / "some.txt").write_text("abc")
    with pytest.raises(TextError, match=r"--dtype is uint16 and .*some\.txt is read as text"):
        read_tokens(tmp_path / "some.txt", ABC, dtype="uint16")


@pytest.mark.parametrize(
    ("vocab", "text", "first"),
    [
        (ByteVocab(), "xé🙂 text\n", "x"),
        (CharVocab.build("é🙂 text\n"), "é🙂 text\n", "é"),
        (WordVocab(["<unk>", "<eos>", "é🙂", "text"]), "é🙂 text text\n", "é🙂"),
    ],
)
def test_a_text_and_its_ids_have_the_same_size(vocab: Vocab, text: str, first: str, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text(text, encoding="utf-8")
    read = read_text(tmp_path / "some.txt", vocab)
    size = predicted_size(read, vocab)
    assert size == predicted_size(ReadText(read.tokens), vocab)
    predicted = text.removeprefix(first)
    assert size == TextSize(characters=len(predicted), num_bytes=len(predicted.encode()))


@pytest.mark.parametrize(
    ("facts", "ids", "words"),
    [
        ({"dtype": "uint8"}, b"\0\1\2", None),
        ({"dtype": "uint8"}, b"\0\3", "the token id 3 at index 1, outside"),
        ({"dtype": "uint8"}, b"", "damaged dataset"),
        ({"dtype": "uint16"}, b"\0\1\2", "damaged dataset"),
        ({"dtype": "object"}, b"\0\1", "damaged dataset"),
        ([], b"\0\1", "damaged dataset"),
    ],
)
def test_a_dataset_gives_its_test_part(facts: object, ids: bytes, words: str | None, tmp_path: Path) -> None:
    write_json(tmp_path / "data.json", facts)
    write_json(tmp_path / "vocab.json", ABC.to_json())
    (tmp_path / "test.bin").write_bytes(ids)
    if words is None:
        assert read_tokens(tmp_path, ABC).tolist() == [0, 1, 2]
        return
    with pytest.raises(TextError, match=words):
        read_tokens(tmp_path, ABC)


@pytest.mark.parametrize("vocab", [ABC, WordVocab(["<unk>", "a"])])
def test_what_holds_nul_is_no_text(vocab: Vocab, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_bytes(b"abc\0a")
    with pytest.raises(TextError, match=r"line 1 of .*some\.txt has a NUL byte, so it is not text"):
        read_tokens(tmp_path / "some.txt", vocab)
    assert len(read_tokens(tmp_path / "some.txt", ByteVocab())) == 5


def test_the_share_of_unknown_words() -> None:
    vocab = WordVocab(["<unk>", "<eos>", "the"])
    assert unknown_share(vocab, vocab.encode("the cat\nthe the")) == pytest.approx(1 / 5)
    assert unknown_share(WordVocab(["the"]), np.zeros(3)) is None
    assert unknown_share(ABC, np.zeros(3)) is None
    assert unknown_share(ByteVocab(), np.zeros(3)) is None
