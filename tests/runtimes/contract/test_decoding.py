"""Tokens that are decoded one by one have together the text that the library decodes at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtimes.contract.vocabulary import ByteVocab, CharVocab, Vocab, decode, vocab_from_file
from runtimes.contract.vocabulary.growing_text import GrowingText
from tests.decoding import pieces_and_rest, random_ids
from tests.runtimes.contract.test_subword import trained
from tests.web import cases

TEXTS = [
    *cases.random_texts(150),
    "the cat \ufffd",
    "n" + "\ufffd" * 4,
    "a\n",
    "🙂🙂\n\n",
    "  the  cat",
    "ж🦜",
]


def suffixes() -> Tokenizer:
    """A BPE whose words end with a mark, as GPT-1 has them: the last token of a text has no blank."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=80, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([cases.LINES], trainer)
    return tokenizer


def whole_words() -> Tokenizer:
    """Words, and no decoder: the library puts blanks between tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[M]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        [cases.LINES], trainers.WordLevelTrainer(special_tokens=["[M]"], show_progress=False)
    )
    return tokenizer


def with_library(kind: str, folder: Path) -> tuple[Vocab, Callable[[list[int]], str]]:
    """A vocabulary, and what its library decodes ids to."""
    if kind == "byte":
        return ByteVocab(), lambda ids: bytes(ids).decode("utf-8", errors="replace")
    if kind == "char":
        vocab = CharVocab.build("".join(TEXTS))
        return vocab, lambda ids: "".join(vocab.symbols[token] for token in ids)
    if kind == "sentencepiece":
        file = trained(kind, folder)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        return vocab_from_file(file), processor.decode
    made = {"suffixes": suffixes, "whole-words": whole_words, "byte-fallback": cases.byte_fallback}
    made |= {"byte-level": cases.byte_level, "added": cases.added_tokens, "unigram": cases.unigram}
    made |= {"characters": cases.characters}
    tokenizer = made[kind]() if kind in made else Tokenizer.from_file(str(trained(kind, folder)))
    vocab = cases.subwords(tokenizer, more=2)
    return vocab, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


KINDS = ("byte", "char", "byte-level", "added", "byte-fallback", "characters", "unigram", "wordpiece")


@pytest.mark.parametrize("kind", [*KINDS, "suffixes", "whole-words", "sentencepiece"])
def test_pieces_join_to_the_text_of_the_library(kind: str, tmp_path: Path) -> None:
    vocab, library = with_library(kind, tmp_path)
    for ids in random_ids(vocab, TEXTS, 250):
        assert "".join(pieces_and_rest(vocab, ids)) == library(ids) == decode(vocab, ids), ids


@pytest.mark.parametrize("kind", [*KINDS, "suffixes", "whole-words", "sentencepiece"])
def test_a_continuation_joins_to_the_text_before_it(kind: str, tmp_path: Path) -> None:
    vocab, library = with_library(kind, tmp_path)
    compared = 0
    for ids in random_ids(vocab, TEXTS, 100):
        for at in {1, len(ids) // 2, len(ids) - 1} - {0}:
            decoder = vocab.decoder()
            before = "".join(map(decoder, ids[:at])) + decoder.rest()
            if decoder.rest() != decoder.rest(half=False) or not library(ids).startswith(before):
                continue  # a later byte changes what was shown
            primed = vocab.decoder()
            primed.prime(ids[:at])
            assert before + "".join(map(primed, ids[at:])) + primed.rest() == library(ids), (ids, at)
            compared += 1
    assert compared > 30


def test_a_newline_of_byte_tokens_is_shown_once(tmp_path: Path) -> None:
    vocab, _ = with_library("byte-fallback", tmp_path)
    line, the = vocab.encode("the cat\n").tolist(), vocab.encode(" the").tolist()
    prompt = vocab.decoder()
    prompt.prime(line)
    after = GrowingText(prompt, ["\n"], "")
    assert "".join(after.add(token, last=False) for token in the) == decode(vocab, line + the)[8:]
    turn = GrowingText(vocab.decoder(), [], "", goes_on=True)
    assert "".join(turn.add(token, last=token == line[-1]) for token in line) == "the cat\n"


@pytest.mark.parametrize("kind", ["byte", "byte-level", "byte-fallback"])
def test_a_real_replacement_character_stays(kind: str, tmp_path: Path) -> None:
    vocab, _ = with_library(kind, tmp_path)
    for text in ("n\ufffd", "n" + "\ufffd" * 4):
        assert decode(vocab, vocab.encode(text)) == text


def test_a_word_after_a_control_token_keeps_its_blank(tmp_path: Path) -> None:
    vocab, _ = with_library("sentencepiece", tmp_path)
    the, cat = vocab.encode("the").tolist(), vocab.encode("cat").tolist()
    assert decode(vocab, [*the, vocab.special.end_of_document, *cat]) == "the cat"


@pytest.mark.parametrize("kind", ["byte", "byte-level", "sentencepiece"])
def test_a_character_shows_with_its_last_byte(kind: str, tmp_path: Path) -> None:
    vocab, _ = with_library(kind, tmp_path)
    ids = vocab.encode("ж🦜").tolist()  # these characters are not in the text that it was trained on
    assert len(ids) > 4
    assert "".join(pieces_and_rest(vocab, ids)) == "ж🦜"
    assert set(pieces_and_rest(vocab, ids)) == {"", "ж", "🦜"}


def test_half_a_character_ends_a_text_as_a_replacement_character() -> None:
    for goes_on, shown in ((False, "a\ufffd"), (True, "a")):
        text = GrowingText(ByteVocab().decoder(), ["stop"], "", goes_on=goes_on)
        assert "".join(text.add(token, last=token != 97) for token in (97, 0xC3)) == shown
        assert text.ended == "length"
    ended = GrowingText(ByteVocab().decoder(), [], "")
    assert ended.add(0xC3, last=False) + ended.finish() == "\ufffd"


def test_a_stop_string_of_byte_tokens_stops_at_once(tmp_path: Path) -> None:
    vocab, _ = with_library("byte-fallback", tmp_path)
    text = GrowingText(vocab.decoder(), ["\n"], "")
    ids = vocab.encode("the cat\n").tolist()
    assert "".join(text.add(token, last=False) for token in ids) == "the cat"
    assert text.ended == "stop"
