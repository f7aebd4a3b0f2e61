"""Vocabularies of every kind and option, and random texts for them."""

from __future__ import annotations

import functools
import random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtimes.contract.vocabulary import ByteVocab, CharVocab, IdsVocab, Vocab, WordVocab
from runtimes.contract.vocabulary.subword import SubwordVocab, pieces
from trainer.data.subwords import learn_subwords

LINES = "the cat sat on the mat\nthe dog sat on the log, the cat — naïve 🙂 — ran\n" * 40
# What random texts are made of: letters of several scripts, blanks that languages disagree on, marks, emoji.
ALPHABETS = (
    "abcdefghij the quick brown",
    "ABCXYZ 0123456789",
    " \n\t\r\f\v\x1c\x1d\x85\xa0\u2003\u3000",
    "éüñßİıſŁ漢字かなカナعربيעברית",
    "🙂👩‍👩‍👧🇩🇪",
    "\u0301\u0300\u200d\ufe0f\ufeff\ufffd",
    ",.!?;:-_()[]{}<>|#@'ａｂｃ①②",
)
WORDS = ("the ", "cat ", "sat on", " the log", ", ran\n", "'ll", "  ", "naïve", "<|endoftext|>", "</s>")


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of any Unicode characters, the same in every run."""
    draw = random.Random(seed)

    def part() -> str:
        return draw.choice(draw.choice(ALPHABETS)) if draw.random() < 0.7 else draw.choice(WORDS)

    return ["".join(part() for _ in range(draw.randrange(40))) for _ in range(count)]


def byte_level(*, size: int = 300, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE, as GPT-2 has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return _trained(tokenizer, decoders.ByteLevel(), size)


def split_by_pattern() -> Tokenizer:
    """A byte-level BPE over a pattern, as newer models have one, with Unicode's normal form."""
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, level])
    return _trained(tokenizer, decoders.ByteLevel(), 300)


def byte_fallback() -> Tokenizer:
    """A BPE with bytes for what it lacks, as SentencePiece models have it when they are converted."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([LINES], trainer)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([LINES], trainer)
    return tokenizer


def added_tokens() -> Tokenizer:
    """A byte-level BPE with added tokens: of the characters that stand for bytes, and of others."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġadded", "é", "漢字"])
    return tokenizer


def characters() -> Tokenizer:
    """A BPE over characters that keeps each blank, as `xl-export data --tokenizer bpe` learns one."""
    learned = learn_subwords("bpe", 120, lambda: iter([LINES]))
    return Tokenizer.from_str(learned.content.decode())


def _trained(tokenizer: Tokenizer, decoder: Any, size: int) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([LINES], trainer)
    tokenizer.decoder = decoder
    return tokenizer


def subwords(tokenizer: Tokenizer, more: int = 0) -> SubwordVocab:
    """The vocabulary of a model that has some tokens more than its library."""
    content = tokenizer.to_str().encode()
    return SubwordVocab("tokenizers", content, size=tokenizer.get_vocab_size() + more)


@functools.cache
def vocabularies(text: str) -> dict[str, Vocab]:
    """One of every kind and option. Tests must not change them."""
    symbols = ["<unk>", "<eos>", "<s>", "the", "cat", "naïve", "i̇", ",", "🙂"]
    return {
        "byte": ByteVocab(),
        "byte-values": ByteVocab([*range(32, 127), 10, 195, 169], skipped=[13, 9]),
        "char": CharVocab.build(text + "🙂\u0301"),
        "word": WordVocab(symbols, lower_case=True),
        "word-lines": WordVocab(symbols, start_of_line="<s>"),
        "word-no-lines": WordVocab(symbols[3:], end_of_line=None, unknown="none"),
        "ids": IdsVocab(9),
        "ids-names": IdsVocab(9, names=symbols),
        "byte-level": subwords(byte_level()),
        "byte-level-prefix": subwords(byte_level(prefix=True)),
        "byte-level-added": subwords(added_tokens()),
        "pattern": subwords(split_by_pattern()),
        "byte-fallback": subwords(byte_fallback(), more=2),
        "characters": subwords(characters()),
        "unigram": subwords(unigram()),
        "unigram-learned": learn_subwords("unigram", 27, lambda: iter([LINES])),
    }


def long_text() -> list[str]:
    """A text that is longer than what a library of subwords encodes at a time, and its pieces."""
    text = "".join(random_texts(9000, seed=3)) + "🙂" * 300_000
    return [text, *pieces(text)]
