"""A vocabulary whose tokens are the words between white space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from runtimes.base.errors import TextError
from runtimes.contract.vocabulary.base import (
    Decoder,
    SpecialTokens,
    VocabKind,
    WholeTokens,
    as_text,
    refuse_nul,
)

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
# The options of `WordVocab` with their defaults; `vocab.json` has those that differ.
WORD_OPTIONS = {"unknown": UNKNOWN, "end_of_line": END_OF_LINE, "start_of_line": None, "lower_case": False}


class WordVocab:
    """Each word between white space is a token.

    A word outside the vocabulary becomes `unknown`, a newline `end_of_line`.

    end_of_line: if None, a newline is white space like any other. start_of_line: a symbol before each line,
    if any. lower_case: whether a text is lower-cased first. Decoding puts one blank between words, so it
    restores a text but not its white space.
    """

    kind: VocabKind = "word"

    def __init__(
        self,
        symbols: list[str],
        *,
        unknown: str = UNKNOWN,
        end_of_line: str | None = END_OF_LINE,
        start_of_line: str | None = None,
        lower_case: bool = False,
    ) -> None:
        self.symbols = symbols
        self.size = len(symbols)
        self.unknown = unknown
        self.end_of_line = end_of_line
        self.start_of_line = start_of_line
        self.lower_case = lower_case
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}
        self.special = SpecialTokens(
            unknown=self._ids.get(unknown),
            end_of_line=None if end_of_line is None else self._ids.get(end_of_line),
            beginning=None if start_of_line is None else self._ids.get(start_of_line),
        )

    @classmethod
    def build(cls, text: str, *, min_count: int = 1, max_size: int | None = None) -> WordVocab:
        """The vocabulary of a text: see `from_counts`."""
        return cls.from_counts(Counter(text.split()), min_count=min_count, max_size=max_size)

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, min_count: int = 1, max_size: int | None = None
    ) -> WordVocab:
        """The vocabulary of words that were counted, the most frequent first, as an adaptive softmax needs
        it; ties in the order of `counts`.

        min_count: rarer words are left out. max_size: the largest number of symbols; None for no limit.
        """
        most_common = sorted(counts.items(), key=lambda item: -item[1])  # keeps the order of ties
        kept = [
            word for word, count in most_common if count >= min_count and word not in (UNKNOWN, END_OF_LINE)
        ]
        return cls([UNKNOWN, END_OF_LINE, *kept][:max_size])

    def encode(self, text: str | bytes) -> np.ndarray:
        refuse_nul(text)
        unknown = self._ids.get(self.unknown, -1)
        text = as_text(text)
        words = list(_words(text.lower() if self.lower_case else text, self.end_of_line, self.start_of_line))
        ids = np.fromiter((self._ids.get(word, unknown) for word in words), np.int64, len(words))
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            raise TextError(
                f"{words[at]!r}, token {at + 1} of the text, is not among the {self.size} words of this "
                f"model, which has no {self.unknown}; remove it from the text."
            )
        return ids

    def decoder(self) -> Decoder:
        at_line_start = True
        begun = self.start_of_line is None

        def decode(token: int) -> str:
            nonlocal at_line_start, begun
            symbol = self.symbols[token]
            if not begun and symbol == self.start_of_line:
                begun = True
                return ""
            word = "\n" if symbol == self.end_of_line else symbol
            blank = "" if at_line_start or word == "\n" else " "
            at_line_start = word == "\n"
            begun = self.start_of_line is None or not at_line_start
            return blank + word

        return WholeTokens(decode)

    def to_json(self) -> dict[str, Any]:
        options = {
            name: value
            for name, value in vars(self).items()
            if name in WORD_OPTIONS and value != WORD_OPTIONS[name]
        }
        return {"kind": self.kind, "symbols": self.symbols, **options}


def _words(
    text: str, end_of_line: str | None = END_OF_LINE, start_of_line: str | None = None
) -> Iterable[str]:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if number and end_of_line:
            yield end_of_line
        words = line.split()
        if start_of_line and (words or number < len(lines) - 1):
            yield start_of_line
        yield from words
