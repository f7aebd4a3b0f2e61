"""Text to token ids and back: bytes, characters or words.

Each vocabulary is stored beside its model as `vocab.json`; it is never rebuilt from a corpus.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from runtimes.base.errors import ArtefactError, TextError
from runtimes.base.files import read_json

SURROGATE = re.compile("[\ud800-\udfff]")
UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
VocabKind = Literal["byte", "char", "word"]
Decoder = Callable[[int], str]  # the text that one more token adds


class Vocab(Protocol):
    """A vocabulary encodes text to int64 ids [N] and decodes ids. `size` is V."""

    kind: VocabKind
    size: int

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decoder(self) -> Decoder:
        """A function that takes tokens one by one and returns the text that each of them completes."""
        ...

    def to_json(self) -> dict[str, Any]: ...


class ByteVocab:
    """Each byte is a token. Decoding returns a UTF-8 character when its last byte has come.

    values: the byte of each token, all 256 by default. skipped: bytes that encoding leaves out, because the
    project in which the model was trained left them out.
    """

    kind: VocabKind = "byte"

    def __init__(self, values: Sequence[int] = range(256), skipped: Sequence[int] = ()) -> None:
        self.values, self.skipped, self.size = list(values), list(skipped), len(values)
        self._ids = np.full(256, -1)
        self._ids[self.values] = np.arange(self.size)

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            data = text.encode("utf-8") if isinstance(text, str) else text
        except (
            UnicodeEncodeError
        ) as error:  # half a surrogate pair, such as an argument's byte that is not UTF-8
            raise TextError(
                f"{text[error.start]!r}, character {error.start} of the text, is not Unicode text."
            ) from error
        everything = found = np.frombuffer(data, np.uint8)
        if self.skipped:
            found = found[~np.isin(found, self.skipped)]
        ids = self._ids[found]
        if len(ids) and ids.min() < 0:
            at = int(np.flatnonzero((self._ids[everything] < 0) & ~np.isin(everything, self.skipped))[0])
            raise TextError(
                f"the text has the byte {everything[at]} at byte {at}, which is not among the {self.size} "
                "bytes that this model was trained on; remove it from the text."
            )
        return ids

    def decoder(self) -> Decoder:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: utf8.decode(bytes([self.values[token]]))

    def to_json(self) -> dict[str, Any]:
        chosen = {} if self.values == list(range(256)) else {"values": self.values}
        return {"kind": self.kind, **chosen, **({"skipped": self.skipped} if self.skipped else {})}


class CharVocab:
    """Each Unicode character is a token. A character that training did not see is refused."""

    kind: VocabKind = "char"

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
                f"{text[at]!r}, character {at} of the text, is not among the {self.size} characters that "
                "this model was trained on; remove it from the text, or train on text that has it."
            )
        return ids

    def decoder(self) -> Decoder:
        return lambda token: self.symbols[token]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "symbols": self.symbols}


class WordVocab:
    """Each word between white space is a token.

    A word outside the vocabulary becomes `unknown`, a newline `end_of_line`.

    Where `end_of_line` is None, a newline is white space like any other. start_of_line: a symbol that stands
    before each line, if any. lower_case: whether a text is lower-cased first. Decoding puts one blank between
    words, so it restores a text but not its white space.
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
        self.symbols, self.size = symbols, len(symbols)
        self.unknown, self.end_of_line, self.start_of_line, self.lower_case = (
            unknown,
            end_of_line,
            start_of_line,
            lower_case,
        )
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}

    @classmethod
    def build(cls, text: str, *, min_count: int = 1) -> WordVocab:
        """The vocabulary of a text, the most frequent word first, as an adaptive softmax needs it; ties in
        order of appearance.
        """
        counts = Counter(text.split())
        counts.pop(UNKNOWN, None)
        counts.pop(END_OF_LINE, None)
        kept = [word for word, count in counts.most_common() if count >= min_count]
        return cls([UNKNOWN, END_OF_LINE, *kept])

    def encode(self, text: str | bytes) -> np.ndarray:
        # A file that is no text would otherwise be read as unknown words.
        if isinstance(text, bytes) and (at := text.find(b"\0")) >= 0:
            raise TextError(
                f"byte {at} of the text is NUL, so it is no text; give a text, or use a model with a byte "
                "vocabulary."
            )
        unknown = self._ids.get(self.unknown, -1)
        text = as_text(text)
        words = list(_words(text.lower() if self.lower_case else text, self.end_of_line, self.start_of_line))
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

        return decode

    def to_json(self) -> dict[str, Any]:
        options = {
            name: value
            for name, value in vars(self).items()
            if name in WORD_OPTIONS and value != WORD_OPTIONS[name]
        }
        return {"kind": self.kind, "symbols": self.symbols, **options}


WORD_OPTIONS = {"unknown": UNKNOWN, "end_of_line": END_OF_LINE, "start_of_line": None, "lower_case": False}


def decode(vocab: Vocab, tokens: Iterable[int]) -> str:
    """The text of a sequence of tokens."""
    decoder = vocab.decoder()
    return "".join(decoder(int(token)) for token in tokens)


def load_vocab(path: Path, content: bytes | bytearray | None = None) -> Vocab:
    """The vocabulary in a `vocab.json`; raises ArtefactError when it is not one.

    Every symbol is Unicode text, so that what a model generates can be printed and encoded. content: of the
    file, where it was read and verified already.
    """
    data = read_json(path, content)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "byte":
        values, skipped = (
            data.get(name, default) for name, default in (("values", [*range(256)]), ("skipped", []))
        )
        lists = isinstance(values, list) and isinstance(skipped, list)
        if not lists or not values or not all(type(x) is int and 0 <= x < 256 for x in (*values, *skipped)):
            raise ArtefactError(
                f"{path} is not a byte vocabulary; expected lists of bytes as its values and skipped."
            )
        if len(set(values)) != len(values):
            raise ArtefactError(f"{path} is not a byte vocabulary; its values repeat.")
        return ByteVocab(values, skipped)
    symbols = data.get("symbols") if kind in ("char", "word") else None
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) and symbol for symbol in symbols):
        raise ArtefactError(
            f"{path} is not a vocabulary; expected kind byte, char or word, and a list of symbols."
        )
    if len(set(symbols)) != len(symbols) or (kind == "char" and any(len(symbol) != 1 for symbol in symbols)):
        raise ArtefactError(
            f"{path} is not a {kind} vocabulary; its symbols repeat or are longer than one character."
        )
    if (symbol := not_unicode(symbols)) is not None:
        raise ArtefactError(
            f"{path} is not a {kind} vocabulary; its symbol {symbol!r:.80} has half of a surrogate pair, "
            "which is no Unicode text."
        )
    if kind == "char":
        return CharVocab(symbols)
    options = {name: data[name] for name in WORD_OPTIONS if name in data}
    marks = {
        name: mark
        for name, mark in options.items()
        if name != "lower_case" and (mark is not None or name == "unknown")
    }
    if not all(isinstance(mark, str) and mark.split() == [mark] for mark in marks.values()):
        raise ArtefactError(
            f"{path} is not a word vocabulary; its symbols {marks!r:.80} are not single words."
        )
    if not isinstance(options.get("lower_case", False), bool):
        raise ArtefactError(
            f"{path} is not a word vocabulary; its lower_case is {options['lower_case']!r:.40}."
        )
    return WordVocab(symbols, **options)


def not_unicode(symbols: Iterable[str]) -> str | None:
    """The first symbol with half of a surrogate pair, which UTF-8 cannot hold; None where there is none."""
    return next((symbol for symbol in symbols if SURROGATE.search(symbol)), None)


def as_text(text: str | bytes) -> str:
    """`text` itself, or bytes decoded as UTF-8; raises TextError where they are not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"byte {error.start} of the text (0x{text[error.start]:02x}) is not UTF-8; convert the text to "
            "UTF-8, or use a model with a byte vocabulary, which takes any file."
        ) from error


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
