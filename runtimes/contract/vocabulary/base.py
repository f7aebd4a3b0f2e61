"""What every vocabulary offers, and the text helpers that they share."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np

from runtimes.base.errors import TextError

SURROGATE = re.compile("[\ud800-\udfff]")
VocabKind = Literal["byte", "char", "word", "subword", "ids"]


class Decoder(Protocol):
    """Decodes one stream of tokens: called with its tokens one by one.

    What the calls return, followed by `rest`, is the text of all tokens, exactly as the vocabulary's own
    library decodes them together.
    """

    def __call__(self, token: int, /) -> str:
        """The text that this token settles: no later token can change it."""
        ...

    def rest(self, *, half: bool = True) -> str:
        """The text that would follow if the stream ended here, such as U+FFFD for half a character.

        It changes nothing: the stream may continue. half: whether half a character at the end counts.
        """
        ...

    def prime(self, tokens: Iterable[int], /) -> None:
        """Reads tokens whose text is shown already, such as a prompt: what follows only continues it.

        Half a character at their end does not count as shown; the token that ends it returns it.
        """
        ...


class WholeTokens:
    """A decoder of a vocabulary in which each token settles its own text. decode: what a token adds."""

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode

    def __call__(self, token: int, /) -> str:
        return self._decode(token)

    def rest(self, *, half: bool = True) -> str:
        return ""

    def prime(self, tokens: Iterable[int], /) -> None:
        for token in tokens:
            self(token)


class ByteDecoder:
    """A decoder of a vocabulary in which each token is bytes of UTF-8. bytes_of: the bytes of a token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, token: int, /) -> str:
        return self._utf8.decode(self._bytes_of(token))

    def rest(self, *, half: bool = True) -> str:
        return self._utf8.getstate()[0].decode("utf-8", errors="replace") if half else ""

    def prime(self, tokens: Iterable[int], /) -> None:
        self._utf8.decode(b"".join(map(self._bytes_of, tokens)))


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of the tokens that have a meaning of their own; None if a vocabulary has no such token."""

    end_of_document: int | None = None  # follows each document in training, and ends a generated text
    beginning: int | None = None  # precedes a text in some projects
    unknown: int | None = None  # replaces what the vocabulary lacks
    padding: int | None = None
    """Token that fills rows in some projects. Here rows are padded by their positions, and it is never a
    target.
    """
    end_of_line: int | None = None  # a newline in a vocabulary of words
    first: int | None = None  # preceded each text in training, as the model's tokenizer puts it

    @property
    def before_text(self) -> int | None:
        """The token from which the first token of a text is predicted, as a model has learned it.

        In the streams of training, here and in fairseq, that is the end of the document before. Without such
        a token it is the beginning, as `<S>` before a sentence, or the end of a line. A model whose tokenizer
        put a token before each text has learned from that, and the vocabulary says so with `first`.
        """
        return _first_of(self.first, self.end_of_document, self.beginning, self.end_of_line)

    @property
    def after_text(self) -> int | None:
        """The token that ends a text: the end of a document, or of a line."""
        return _first_of(self.end_of_document, self.end_of_line)

    def to_json(self) -> dict[str, int]:
        """The ids by name, without those that are None."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None
        }


def _first_of(*ids: int | None) -> int | None:
    return next((token for token in ids if token is not None), None)


class Vocab(Protocol):
    """A vocabulary encodes text to int64 ids [N] and decodes ids. `size` is V."""

    kind: VocabKind
    size: int
    special: SpecialTokens

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text; raises TextError for a text that the vocabulary cannot hold."""
        ...

    def decoder(self) -> Decoder:
        """A new decoder, at the beginning of a text."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The content of `vocab.json`."""
        ...


def decode(vocab: Vocab, tokens: Iterable[int]) -> str:
    """The text of a sequence of tokens."""
    return "".join(token_texts(vocab, tokens))


def token_texts(vocab: Vocab, tokens: Iterable[int]) -> list[str]:
    """The text that each token adds to the text of a sequence; joined, they are that text.

    A token that only begins a character adds nothing, and the token that ends it adds the character.
    """
    decoder = vocab.decoder()
    texts = [decoder(int(token)) for token in tokens]
    if texts:
        texts[-1] += decoder.rest()
    return texts


def not_unicode(symbols: Iterable[str]) -> str | None:
    """The first symbol with half of a surrogate pair, which UTF-8 cannot hold; None if there is none."""
    return next((symbol for symbol in symbols if SURROGATE.search(symbol)), None)


def refuse_nul(text: str | bytes) -> None:
    """Raises TextError for bytes with a NUL: they are not text, and would be read as unknown words."""
    if isinstance(text, bytes) and (at := text.find(b"\0")) >= 0:
        raise TextError(
            f"byte {at} of the text is NUL, so it is no text; give a text, or use a model with a byte "
            "vocabulary."
        )


def as_text(text: str | bytes) -> str:
    """`text` itself, or bytes decoded as UTF-8; raises TextError if they are not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"byte {error.start} of the text (0x{text[error.start]:02x}) is not UTF-8; convert the text to "
            "UTF-8, or use a model with a byte vocabulary, which takes any file."
        ) from error
