"""A vocabulary of subwords, computed by the library that made it: `tokenizers` or SentencePiece.

The library's own file travels beside `vocab.json` and is never rewritten. The library itself is imported when
the first text is encoded or decoded, so a device that works with ids alone does not need it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from runtimes.base.errors import ArtefactError, TextError, UserError, first_line, needs, of_library
from runtimes.contract.vocabulary.base import (
    Decoder,
    SpecialTokens,
    VocabKind,
    as_text,
    not_unicode,
    refuse_nul,
)

Library = Literal["tokenizers", "sentencepiece"]
FILES: dict[Library, str] = {"tokenizers": "tokenizer.json", "sentencepiece": "tokenizer.model"}
PIECE = 1 << 18  # characters of a text that the library encodes at a time
LINE_END = re.compile(r"\n(?=\S)")
UNFINISHED = "\ufffd"  # what both libraries decode the first bytes of a character to
LONGEST_CHARACTER = 8  # tokens; after so many, an unfinished character is broken for good
# The names that projects give to their special tokens, for files that do not say which token is which.
END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
BEGINNING_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<|bos|>", "[BOS]", "<BOS>")
UNKNOWN_NAMES = ("<unk>", "[UNK]", "<|unk|>", "<UNK>")
PADDING_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<PAD>")


class Engine(Protocol):
    """What this project uses of a library."""

    size: int
    special: SpecialTokens

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def id_of(self, token: str) -> int | None: ...


class SubwordVocab:
    """Subwords of a `tokenizer.json` (BPE, Unigram, WordPiece, byte-level) or a SentencePiece `.model`.

    content: the bytes of that file. size: the model's number of tokens, at least that of the file; the
    file's own when None. special: which tokens have a meaning of their own, as the file says when None.

    The ids are those of the library, without tokens that it would add in front or at the end. A text longer
    than `PIECE` characters is encoded in pieces that end at the end of a line, so that memory stays bounded;
    where a piece begins, a library that puts a blank before a text puts one there too.
    Text that looks like a special token becomes that token where the library says so.
    """

    kind: VocabKind = "subword"

    def __init__(
        self,
        library: Library,
        content: bytes,
        *,
        size: int | None = None,
        special: SpecialTokens | None = None,
    ) -> None:
        self.library, self.content = library, content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.size = self._engine.size if size is None else size
        self.special = self._engine.special if special is None else special

    @cached_property
    def _engine(self) -> Engine:
        return _engines()[self.library](self.content)

    @property
    def files(self) -> Mapping[str, bytes]:
        return {FILES[self.library]: self.content}

    def id_of(self, token: str) -> int | None:
        """The id that the library gives to a token, such as `</s>`; None where it has no such token."""
        return self._engine.id_of(token)

    def encode(self, text: str | bytes) -> np.ndarray:
        refuse_nul(text)
        text = as_text(text)
        if not_unicode([text]) is not None:
            raise TextError("the text has half of a surrogate pair, which is no Unicode text; remove it.")
        ids: list[int] = []
        for piece in pieces(text):
            ids += self._engine.encode(piece)
        encoded = np.array(ids, np.int64)
        if len(encoded) and encoded.max() >= self.size:
            raise TextError(
                f"the text has the token {encoded.max()}, and the model has {self.size} tokens; its "
                f"{FILES[self.library]} is of another model."
            )
        return encoded

    def decoder(self) -> Decoder:
        """Pieces are decoded with the tokens before them, because what a token adds depends on those."""
        shown: list[int] = []  # tokens whose text has been returned; only the last of them matter
        waiting: list[int] = []

        def decode(token: int) -> str:
            waiting.append(token)
            before, after = self._engine.decode(shown), self._engine.decode([*shown, *waiting])
            if after.endswith(UNFINISHED) and len(waiting) < LONGEST_CHARACTER:
                return ""
            kept = next(
                (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before)
            )
            shown[:], waiting[:] = waiting, []
            return after[min(kept, len(after)) :]

        return decode

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "library": self.library,
            "file": FILES[self.library],
            "sha256": self.sha256,
            "size": self.size,
            "special": self.special.to_json(),
        }


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that end at the end of a line, where there is none in front of a blank, and
    where there is none either after `PIECE` characters.

    Whatever follows a text changes its last piece alone, so a long text can be cut while it is read.
    """
    at = 0
    while len(text) - at > PIECE:
        ends = [match.end() for match in LINE_END.finditer(text, at + 1, at + PIECE)]
        end = ends[-1] if ends else text.rfind(" ", at + 1, at + PIECE)
        end = end if end > 0 else at + PIECE
        yield text[at:end]
        at = end
    yield text[at:]


class _Tokenizers:
    """A `tokenizer.json` of Hugging Face's library `tokenizers`."""

    def __init__(self, content: bytes) -> None:
        with needs("subword", "tokenizers"):
            from tokenizers import Tokenizer
        with _refused("tokenizer.json"):
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            model = json.loads(content).get("model") or {}
        self.size = max(vocabulary.values(), default=-1) + 1
        unknown = model.get("unk_token")
        if unknown is None and isinstance(model.get("unk_id"), int):  # Unigram
            unknown = self._tokenizer.id_to_token(model["unk_id"])
        self.special = SpecialTokens(
            end_of_document=_named(vocabulary, END_NAMES),
            beginning=_named(vocabulary, BEGINNING_NAMES),
            unknown=_named(vocabulary, (unknown, *UNKNOWN_NAMES)),
            padding=_named(vocabulary, PADDING_NAMES),
        )

    def encode(self, text: str) -> list[int]:
        with _refused("text"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class _SentencePiece:
    """A `.model` of SentencePiece."""

    def __init__(self, content: bytes) -> None:
        with needs("subword", "sentencepiece"):
            from sentencepiece import SentencePieceProcessor
        with _refused("SentencePiece model"):
            self._processor = SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(content)
            self.size = self._processor.get_piece_size()
            names = ("end_of_document", "beginning", "unknown", "padding")
            ids = (
                self._processor.eos_id,
                self._processor.bos_id,
                self._processor.unk_id,
                self._processor.pad_id,
            )
            told = {name: found for name, get in zip(names, ids, strict=True) if (found := get()) >= 0}
        if self.size == 0:
            raise ArtefactError("the SentencePiece model has no pieces; give a trained one.")
        self.special = SpecialTokens(**told)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode([token for token in ids if token < self.size])
        return text

    def id_of(self, token: str) -> int | None:
        found: int = self._processor.piece_to_id(token)  # that of the unknown piece for what it lacks
        return found if self._processor.id_to_piece(found) == token else None


def _engines() -> dict[Library, Callable[[bytes], Engine]]:
    return {"tokenizers": _Tokenizers, "sentencepiece": _SentencePiece}


def _named(vocabulary: Mapping[str, int], names: Iterable[Any]) -> int | None:
    """The id of the first of these names that the vocabulary has."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raises ArtefactError where a library fails on a file or a text.

    `tokenizers` is written in Rust, whose panics are no subclass of Exception.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not of_library(error):
            raise
        raise ArtefactError(
            f"the {what} could not be used by the library of the vocabulary ({first_line(error):.200}); give "
            "a file that this library has written, and a text in UTF-8."
        ) from error
