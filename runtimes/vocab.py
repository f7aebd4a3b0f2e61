"""Text to token ids and back: bytes, characters or words.

Each vocabulary is stored beside its model as `vocab.json`; it is never rebuilt from a corpus.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtimes.errors import ArtefactError, TextError
from runtimes.files import read_json

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
Decoder = Callable[[int], str]  # text that one more token adds


class Vocab(Protocol):
    """Encodes text to int64 ids [N] and decodes ids; `size` is V."""

    kind: str
    size: int

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decoder(self) -> Decoder:
        """A function that takes tokens one by one and returns the text each of them completes."""
        ...

    def to_json(self) -> dict[str, Any]: ...


class ByteVocab:
    """The 256 byte values; any file is valid. Decoding joins bytes to UTF-8 characters as they complete."""

    kind, size = "byte", 256

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            data = text.encode("utf-8") if isinstance(text, str) else text
        except UnicodeEncodeError as error:  # half of a surrogate pair, such as a byte of an argument that is not UTF-8
            raise TextError(f"{text[error.start]!r}, character {error.start} of the text, is not Unicode text.") from error
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decoder(self) -> Decoder:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: utf8.decode(bytes([token]))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


class CharVocab:
    """Unicode characters, each its own token; a character that training did not see is refused."""

    kind = "char"

    def __init__(self, symbols: list[str]) -> None:
        self.symbols, self.size = symbols, len(symbols)
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}

    @classmethod
    def build(cls, text: str) -> CharVocab:
        return cls(sorted(set(text)))

    def encode(self, text: str | bytes) -> np.ndarray:
        text = as_text(text)
        ids = np.fromiter((self._ids.get(symbol, -1) for symbol in text), np.int64, len(text))
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            raise TextError(
                f"{text[at]!r}, character {at} of the text, is not among the {self.size} characters that this "
                "model was trained on; remove it from the text, or train on text that has it."
            )
        return ids

    def decoder(self) -> Decoder:
        return lambda token: self.symbols[token]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "symbols": self.symbols}


class WordVocab:
    """Words between white space; each newline is `end_of_line` and every other word `unknown`.

    Decoding puts one blank between words, so the text comes back only up to white space.
    """

    kind = "word"

    def __init__(self, symbols: list[str], *, unknown: str = UNKNOWN, end_of_line: str = END_OF_LINE) -> None:
        self.symbols, self.size = symbols, len(symbols)
        self.unknown, self.end_of_line = unknown, end_of_line
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}

    @classmethod
    def build(cls, text: str, *, min_count: int = 1) -> WordVocab:
        """Most frequent word first (ties in order of appearance), as adaptive softmax needs it."""
        counts = Counter(text.split())
        counts.pop(UNKNOWN, None)
        counts.pop(END_OF_LINE, None)
        kept = [word for word, count in counts.most_common() if count >= min_count]
        return cls([UNKNOWN, END_OF_LINE, *kept])

    def encode(self, text: str | bytes) -> np.ndarray:
        unknown = self._ids.get(self.unknown, -1)
        words = as_text(text).replace("\n", f" {self.end_of_line} ").split()
        ids = np.fromiter((self._ids.get(word, unknown) for word in words), np.int64, len(words))
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            raise TextError(
                f"{words[at]!r}, word {at} of the text, is not among the {self.size} words of this model, "
                f"which has no {self.unknown}; remove it from the text."
            )
        return ids

    def decoder(self) -> Decoder:
        at_line_start = True

        def decode(token: int) -> str:
            nonlocal at_line_start
            word = "\n" if self.symbols[token] == self.end_of_line else self.symbols[token]
            blank = "" if at_line_start or word == "\n" else " "
            at_line_start = word == "\n"
            return blank + word

        return decode

    def to_json(self) -> dict[str, Any]:
        marks = {"unknown": self.unknown, "end_of_line": self.end_of_line}
        usual = {"unknown": UNKNOWN, "end_of_line": END_OF_LINE}
        return {"kind": self.kind, **({} if marks == usual else marks), "symbols": self.symbols}


def decode(vocab: Vocab, tokens: Iterable[int]) -> str:
    """The text of a sequence of tokens."""
    decoder = vocab.decoder()
    return "".join(decoder(int(token)) for token in tokens)


def load_vocab(path: Path) -> Vocab:
    """The vocabulary in a `vocab.json`; raises ArtefactError when it is not one."""
    data = read_json(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "byte":
        return ByteVocab()
    symbols = data.get("symbols") if kind in ("char", "word") else None
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) and symbol for symbol in symbols):
        raise ArtefactError(f"{path} is not a vocabulary; expected kind byte, char or word, and a list of symbols.")
    if len(set(symbols)) != len(symbols) or (kind == "char" and any(len(symbol) != 1 for symbol in symbols)):
        raise ArtefactError(f"{path} is not a {kind} vocabulary; its symbols repeat or are longer than one character.")
    if kind == "char":
        return CharVocab(symbols)
    marks = {name: data[name] for name in ("unknown", "end_of_line") if name in data}
    if not all(isinstance(mark, str) and mark.split() == [mark] for mark in marks.values()):
        raise ArtefactError(f"{path} is not a word vocabulary; its marks {marks!r:.80} are not single words.")
    return WordVocab(symbols, **marks)


def as_text(text: str | bytes) -> str:
    """`text` itself, or bytes decoded as UTF-8; raises TextError where they are not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"byte {error.start} of the text (0x{text[error.start]:02x}) is not UTF-8; convert the text to UTF-8, "
            "or use a model with a byte vocabulary, which takes any file."
        ) from error
