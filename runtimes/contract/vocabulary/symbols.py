"""Vocabularies whose tokens are bytes or characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from runtimes.base.errors import TextError
from runtimes.contract.vocabulary.base import (
    ByteDecoder,
    Decoder,
    SpecialTokens,
    VocabKind,
    WholeTokens,
    as_text,
)


def _and_others(names: list[str]) -> str:
    """`, and also 'b', 'c' and 3 more`, to follow the first of several names; empty without others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f", and also {', '.join(names[:8])}{more}" if names else ""


def _shown(byte: int) -> str:
    """`60 ('<')` for a visible ASCII character; otherwise the number."""
    return f"{byte} ({chr(byte)!r})" if 32 < byte < 127 else f"{byte}"


class ByteVocab:
    """Each byte is a token. Decoding returns a UTF-8 character when its last byte has come.

    values: the byte of each token, all 256 by default. skipped: bytes that encoding leaves out, because the
    project in which the model was trained left them out.
    """

    kind: VocabKind = "byte"
    special = SpecialTokens()

    def __init__(self, values: Sequence[int] = range(256), skipped: Sequence[int] = ()) -> None:
        self.values = list(values)
        self.skipped = list(skipped)
        self.size = len(values)
        self._ids = np.full(256, -1)
        self._ids[self.values] = np.arange(self.size)

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            data = text.encode("utf-8") if isinstance(text, str) else text
        except (
            UnicodeEncodeError
        ) as error:  # half a surrogate pair, such as an argument's byte that is not UTF-8
            raise TextError(
                f"{text[error.start]!r}, character {error.start + 1} of the text, is not Unicode text."
            ) from error
        everything = found = np.frombuffer(data, np.uint8)
        if self.skipped:
            found = found[~np.isin(found, self.skipped)]
        ids = self._ids[found]
        if len(ids) and ids.min() < 0:
            at = int(np.flatnonzero((self._ids[everything] < 0) & ~np.isin(everything, self.skipped))[0])
            others = sorted(set(data) - {*self.values, *self.skipped, data[at]})
            raise TextError(
                f"the text has the byte {_shown(data[at])} at byte {at}, which is not among the {self.size} "
                "bytes that this model was trained on; remove it from the text"
                f"{_and_others([_shown(byte) for byte in others])}."
            )
        return ids

    def decoder(self) -> Decoder:
        return ByteDecoder(lambda token: bytes([self.values[token]]))

    def to_json(self) -> dict[str, Any]:
        chosen = {} if self.values == list(range(256)) else {"values": self.values}
        return {"kind": self.kind, **chosen, **({"skipped": self.skipped} if self.skipped else {})}


class CharVocab:
    """Each Unicode character is a token. A character that training did not see is refused."""

    kind: VocabKind = "char"
    special = SpecialTokens()

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = list(symbols)
        self.size = len(self.symbols)
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}

    @classmethod
    def build(cls, text: str) -> CharVocab:
        return cls(sorted(set(text)))

    def encode(self, text: str | bytes) -> np.ndarray:
        text = as_text(text)
        ids = np.fromiter((self._ids.get(symbol, -1) for symbol in text), np.int64, len(text))
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            others = sorted(set(text) - self._ids.keys() - {text[at]})
            raise TextError(
                f"{text[at]!r}, character {at + 1} of the text, is not among the {self.size} characters that "
                "this model was trained on; remove it from the text"
                f"{_and_others([repr(symbol) for symbol in others])}, or train on text that has it."
            )
        return ids

    def decoder(self) -> Decoder:
        return WholeTokens(self.symbols.__getitem__)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "symbols": self.symbols}
