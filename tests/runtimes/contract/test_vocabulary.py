"""Vocabularies: text to tokens and back, streamed or whole, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base.errors import ArtefactError, TextError
from runtimes.contract.vocabulary import (
    ByteVocab,
    CharVocab,
    IdsVocab,
    SpecialTokens,
    Vocab,
    WordVocab,
    decode,
    load_vocab,
    save_vocab,
)

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))  # no halves of surrogate pairs
LINES = st.lists(st.lists(st.text("abcé", min_size=1, max_size=3), max_size=4).map(" ".join)).map("\n".join)


@given(UNICODE)
def test_bytes_come_back(text: str) -> None:
    vocab = ByteVocab()
    assert decode(vocab, vocab.encode(text)) == text
    assert bytes(vocab.encode(text).tolist()) == text.encode("utf-8")


@given(UNICODE)
def test_characters_come_back(text: str) -> None:
    vocab = CharVocab.build(text)
    assert decode(vocab, vocab.encode(text)) == text
    assert np.array_equal(vocab.encode(text), vocab.encode(text.encode("utf-8")))
    assert vocab.size == len(set(text))


@given(LINES)
def test_words_come_back(text: str) -> None:
    vocab = WordVocab.build(text)
    assert decode(vocab, vocab.encode(text)) == text


@pytest.mark.parametrize("vocab", [ByteVocab(), CharVocab.build("a—é"), WordVocab.build("a é\n é")])
def test_tokens_are_int64_and_empty_text_has_none(vocab: Vocab) -> None:
    assert vocab.encode("aé" if vocab.kind != "word" else "a é").dtype == np.int64
    assert vocab.encode("").shape == (0,)
    assert vocab.encode("").dtype == np.int64


def test_words_are_ordered_by_frequency_and_rare_ones_become_unknown() -> None:
    vocab = WordVocab.build("b a b c\nb a <unk> d", min_count=2)
    assert vocab.symbols == ["<unk>", "<eos>", "b", "a"]
    assert vocab.encode("a new b\n").tolist() == [3, 0, 2, 1]
    assert decode(vocab, vocab.encode("a new b\n")) == "a <unk> b\n"


def test_an_unknown_symbol_is_named_with_its_place() -> None:
    with pytest.raises(TextError, match=r"'z', character 3 of the text, .* 2 .*, and also 'y', or train"):
        CharVocab.build("ab").encode("abzyz")
    with pytest.raises(TextError, match=r"'zed', token 2 of the text, is not among the 2 words"):
        WordVocab(["a", "b"]).encode("a zed b")


def test_only_byte_vocabularies_accept_invalid_utf_8() -> None:
    for vocab in (CharVocab.build("caf"), WordVocab.build("caf")):
        with pytest.raises(TextError, match=r"byte 3 of the text \(0xe9\) is not UTF-8; convert"):
            vocab.encode(b"caf\xe9")
    assert ByteVocab().encode(b"caf\xe9").tolist() == [99, 97, 102, 233]


def test_chosen_bytes_are_numbered_and_others_skipped() -> None:
    vocab = ByteVocab([98, 195, 169, 97], skipped=[10])
    assert vocab.encode("a\nb\né").tolist() == [3, 0, 1, 2]
    assert decode(vocab, [3, 0, 1, 2]) == "abé"
    assert vocab.size == 4
    with pytest.raises(
        TextError, match=r"byte 99 \('c'\) at byte 2, which .* 4 bytes .*, and also 9, 100 \('d'\)\."
    ):
        vocab.encode("abc\tcd")


def test_lines_can_begin_and_end_with_symbols_of_the_vocabulary() -> None:
    vocab = WordVocab(
        ["<S>", "<UNK>", "a", "b"], unknown="<UNK>", end_of_line="<S>", start_of_line="<S>", lower_case=True
    )
    ids = vocab.encode("A b\n\nc A")
    assert ids.tolist() == [0, 2, 3, 0, 0, 0, 0, 1, 2]
    assert decode(vocab, ids) == "a b\n\n<UNK> a"
    assert vocab.encode("a\n").tolist() == [0, 2, 0]
    assert WordVocab(["a", "b"], end_of_line=None).encode("a\nb\n").tolist() == [0, 1]


def test_half_a_surrogate_pair_is_refused_by_bytes() -> None:
    with pytest.raises(TextError, match="character 2 of the text, is not Unicode text"):
        ByteVocab().encode("a\udcff")


@pytest.mark.parametrize(
    "vocab",
    [
        ByteVocab(),
        ByteVocab([32, 101, 10], skipped=[13]),
        CharVocab.build("a—\né\u2028"),
        WordVocab.build("a é\n é"),
        WordVocab(
            ["<S>", "<UNK>", "a"], unknown="<UNK>", end_of_line="<S>", start_of_line="<S>", lower_case=True
        ),
        WordVocab(["a"], end_of_line=None),
    ],
)
def test_a_vocabulary_comes_back_from_its_file(vocab: Vocab, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(vocab.to_json()))
    loaded = load_vocab(tmp_path / "vocab.json")
    assert type(loaded) is type(vocab)
    assert loaded.to_json() == vocab.to_json()
    assert (loaded.size, loaded.special) == (vocab.size, vocab.special)


REFUSED: list[Any] = [
    *(None, [], "char", 1, {}, {"kind": "char"}, {"symbols": ["a"]}, {"kind": "subword", "symbols": ["a"]}),
    *({"kind": kind, "symbols": ["a"]} for kind in (["char"], {})),
    *(
        {"kind": "char", "symbols": symbols}
        for symbols in ("ab", {"a": 0}, ["a", 1], ["a", None], ["a", ""], ["a", "a"], ["ab"])
    ),
    *({"kind": "byte", "values": values} for values in ([1, 1], [256], "a", [])),
    *({"kind": "byte", "skipped": skipped} for skipped in (10, [True])),
    *({"kind": "word", "symbols": symbols} for symbols in (["a", "a"], ["a", ""], ["a", ["b"]])),
    {"kind": "word", "symbols": ["a"], "unknown": None},
    {"kind": "word", "symbols": ["a"], "lower_case": 1},
    *(
        {"kind": "word", "symbols": ["a"], name: mark}
        for name in ("unknown", "end_of_line", "start_of_line")
        for mark in (1, "", " ", "two words", ["<S>"])
    ),
]


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    for document in REFUSED:
        path.write_text(json.dumps(document))
        with pytest.raises(ArtefactError, match=r"vocab\.json is not a"):
            load_vocab(path)
    for content in (b"", b"{", b'{"kind": "char", "symbols": ["\xff"]}'):
        path.write_bytes(content)
        with pytest.raises(ArtefactError, match=r"vocab\.json is not (valid JSON|UTF-8)"):
            load_vocab(path)
    for kind, symbols in (("char", ["a", "\ud800"]), ("word", ["<unk>", "a\udfffb"])):
        path.write_text(json.dumps({"kind": kind, "symbols": symbols}))
        with pytest.raises(ArtefactError, match=r"half of a surrogate pair") as caught:
            load_vocab(path)
        str(caught.value).encode()  # it can be printed


def test_ids_have_names_or_none(tmp_path: Path) -> None:
    named = IdsVocab(3, names=["C4", "D4", "rest"], special=SpecialTokens(end_of_document=2))
    assert named.encode("D4 C4\nrest").tolist() == [1, 0, 2]
    assert decode(named, [1, 0, 2]) == "D4 C4 rest"
    assert decode(IdsVocab(300), [12, 299]) == "12 299"
    with pytest.raises(TextError, match="'E4', word 2 of the text, is not among the names"):
        named.encode("C4 E4")
    assert IdsVocab(300).encode("12\n299 007").tolist() == [12, 299, 7]
    for word in ("300", "-1", "1.5", "1,2", "²", "a"):
        with pytest.raises(TextError, match=r"word 2 of .* numbers of this model's 300"):
            IdsVocab(300).encode(f"12 {word}")
    for vocab in (named, IdsVocab(300)):
        save_vocab(tmp_path, vocab)
        again = load_vocab(tmp_path / "vocab.json")
        assert again.to_json() == vocab.to_json()
        assert again.special == vocab.special


def test_special_tokens_of_words_are_known() -> None:
    vocab = WordVocab(["<eos>", "a", "<unk>", "<S>"], start_of_line="<S>")
    assert vocab.special == SpecialTokens(unknown=2, end_of_line=0, beginning=3)
    assert (vocab.special.before_text, vocab.special.after_text) == (3, 0)
    assert WordVocab(["a"]).special == SpecialTokens()
    assert SpecialTokens(end_of_document=5, end_of_line=4, beginning=3).before_text == 5
    assert SpecialTokens(end_of_document=5, beginning=3, first=3).before_text == 3


def test_a_word_vocabulary_respects_its_maximum_size() -> None:
    assert WordVocab.build("b a b c b a", max_size=3).symbols == ["<unk>", "<eos>", "b"]
