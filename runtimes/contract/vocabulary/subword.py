"""A vocabulary of subwords, computed by the library that made it: `tokenizers` or SentencePiece.

The library's own file travels next to `vocab.json` and is never rewritten. The library itself is imported
when the first text is encoded or decoded, so a device that works only with ids does not need it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from runtimes.base.errors import ArtefactError, TextError, UserError, first_line, needs, of_library
from runtimes.contract.vocabulary.base import (
    SURROGATE,
    ByteDecoder,
    Decoder,
    SpecialTokens,
    VocabKind,
    as_text,
    refuse_nul,
)

Library = Literal["tokenizers", "sentencepiece"]
FILES: dict[Library, str] = {"tokenizers": "tokenizer.json", "sentencepiece": "tokenizer.model"}
PIECE_CHARACTERS = 1 << 18  # characters of a text that the library encodes at a time
# `tokenizers` encodes a shorter text faster by itself than as a batch of one. It then holds Python's lock
# throughout; for a batch it releases the lock.
MIN_BATCHED_CHARS = 1 << 10
LINE_END = re.compile(r"\n(?=\S)")
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # of a vocabulary that falls back to bytes
# Common names of special tokens, for files that do not say which token is which.
END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
BEGINNING_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<|bos|>", "[BOS]", "<BOS>")
UNKNOWN_NAMES = ("<unk>", "[UNK]", "<|unk|>", "<UNK>")
PADDING_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<PAD>")


class Engine(Protocol):
    """What this project uses of a library."""

    size: int
    special: SpecialTokens
    all_bytes: bool  # whether the text is exactly the bytes of all tokens
    byte_runs: bool
    """Whether a later byte can still change a whole character before it, because the library decodes a run of
    byte tokens as a whole: to characters if all of it is UTF-8, and otherwise to U+FFFD for each byte.
    """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def id_of(self, token: str) -> int | None: ...

    def silent(self, token: int) -> bool:
        """Whether the library decodes this token to nothing wherever it is."""
        ...

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of UTF-8 that this token adds; None for a token of whole characters."""
        ...


class SubwordVocab:
    """Subwords of a `tokenizer.json` (BPE, Unigram, WordPiece, byte-level) or a SentencePiece `.model`.

    content: the bytes of that file. size: the model's number of tokens, at least the file's; the
    file's own when None. special: which tokens have a meaning of their own, as the file says when None.

    The ids are the library's, without tokens that it would add in front or at the end. A text of more
    than `PIECE_CHARACTERS` is encoded in pieces that end at the end of a line, which bounds the memory; a
    library that puts a blank before a text also puts one before each piece.
    Text is text: `</s>` in it never becomes a token that the file marks as special (`"special": true` in a
    `tokenizer.json`, control and unknown tokens in a `.model`); `transformers` calls this
    `split_special_tokens=True`. Other added tokens are words, and text becomes them. Limit: a Unigram model
    that has special tokens among its pieces with high scores, as T5's does, still cuts a text into them.
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
        self.library = library
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.size = self._engine.size if size is None else size
        self.special = self._engine.special if special is None else special

    @cached_property
    def _engine(self) -> Engine:
        return _Tokenizers(self.content) if self.library == "tokenizers" else _SentencePiece(self.content)

    def id_of(self, token: str) -> int | None:
        """The library's id of a token, such as `</s>`; None if it has no such token."""
        return self._engine.id_of(token)

    def encode(self, text: str | bytes) -> np.ndarray:
        refuse_nul(text)
        text = as_text(text)
        if SURROGATE.search(text):
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
        engine = self._engine
        if engine.all_bytes:
            return ByteDecoder(engine.bytes_of)  # type: ignore[arg-type]  # never None with `all_bytes`
        return _SubwordDecoder(engine)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "library": self.library,
            "file": FILES[self.library],
            "sha256": self.sha256,
            "size": self.size,
            "special": self.special.to_json(),
        }


class _SubwordDecoder:
    """Decodes one stream with the library, piece by piece.

    A piece is the fewest tokens that end with a whole character (and with a whole run of bytes, see
    `Engine.byte_runs`), so no later token can change its text. Its text is what it adds to the text of the
    tokens before it. Of these the last piece is enough, together with the last one that has text by itself:
    after such a piece a library no longer treats a token as the first of a text, which loses its blank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._anchor: list[int] = []  # the last piece that has text by itself
        self._before: list[int] = []  # the anchor and the last piece
        self._text_before = ""
        self._piece: list[int] = []  # tokens whose text has not been returned
        self._shown = ""  # what `prime` has found of the text of the piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, token: int, /) -> str:
        engine = self._engine
        if not self._piece and engine.silent(token):
            return ""
        self._piece.append(token)
        data = engine.bytes_of(token)
        if data is None:
            self._utf8.reset()
        else:
            self._utf8.decode(data)
            if engine.byte_runs or self._utf8.getstate()[0]:
                return ""
        text = self.rest()
        piece = self._piece
        self._piece = []
        self._shown = ""
        if alone := engine.decode(piece):
            self._anchor = self._before = piece
            self._text_before = alone
        else:
            self._before = self._anchor + piece
            self._text_before = engine.decode(self._before)
        return text

    def rest(self, *, half: bool = True) -> str:
        piece = self._piece
        if not half and (begun := len(self._utf8.getstate()[0])):
            piece = piece[:-begun] if self._engine.byte_runs else []  # in a run each token is one byte
        if not piece:
            return ""
        text = self._engine.decode(self._before + piece)[len(self._text_before) :]
        return text.removeprefix(self._shown)

    def prime(self, tokens: Iterable[int], /) -> None:
        for token in tokens:
            self(token)
        self._shown += self.rest(half=False)


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that end at the end of a line, or else before a blank, or else after
    `PIECE_CHARACTERS`.

    What follows a text only changes its last piece, so a long text can be cut while it is read.
    """
    at = 0
    while len(text) - at > PIECE_CHARACTERS:
        ends = [match.end() for match in LINE_END.finditer(text, at + 1, at + PIECE_CHARACTERS)]
        end = ends[-1] if ends else text.rfind(" ", at + 1, at + PIECE_CHARACTERS)
        end = end if end > 0 else at + PIECE_CHARACTERS
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
            self._tokenizer.encode_special_tokens = True  # as text
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            data = json.loads(content)
            model = data.get("model") or {}
            steps = _types(data.get("decoder"))
        self._byte_level = "ByteLevel" in steps
        self.byte_runs = "ByteFallback" in steps
        self.all_bytes = steps == {"ByteLevel"}
        self._bytes: dict[int, bytes | None] = {}  # of tokens that were looked up
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
            if len(text) < MIN_BATCHED_CHARS:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
            else:
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def silent(self, token: int) -> bool:
        return self.bytes_of(token) == b""  # the model has more tokens than the library

    def bytes_of(self, token: int) -> bytes | None:
        if token not in self._bytes:
            self._bytes[token] = self._looked_up(token)
        return self._bytes[token]

    def _looked_up(self, token: int) -> bytes | None:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in text])
            except KeyError:  # an added token
                return text.encode()
        byte = BYTE_TOKEN.fullmatch(text) if self.byte_runs else None
        return None if byte is None else bytes.fromhex(byte[1])


class _SentencePiece:
    """A `.model` of SentencePiece."""

    all_bytes = byte_runs = False

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
            found_ids = {name: found for name, get in zip(names, ids, strict=True) if (found := get()) >= 0}
        if self.size == 0:
            raise ArtefactError("the SentencePiece model has no pieces; give a trained one.")
        self.special = SpecialTokens(**found_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode([token for token in ids if token < self.size])
        return text

    def id_of(self, token: str) -> int | None:
        found: int = self._processor.piece_to_id(token)  # the id of the unknown piece if it lacks the token
        return found if self._processor.id_to_piece(found) == token else None

    def silent(self, token: int) -> bool:
        return token >= self.size or self._processor.is_control(token)

    def bytes_of(self, token: int) -> bytes | None:
        if token >= self.size:
            return b""
        if not self._processor.is_byte(token):
            return None
        return bytes.fromhex(self._processor.id_to_piece(token)[3:5])


def _byte_characters() -> dict[str, int]:
    """The byte of each character in the tokens of a byte-level vocabulary, as GPT-2 has them: a printable
    character is its own byte, and the other bytes are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_characters()


def _types(decoder: Any) -> set[str]:
    """The types of a decoder in a `tokenizer.json`, and of those in a sequence of them."""
    if not isinstance(decoder, dict):
        return set()
    return {decoder.get("type", "")}.union(*map(_types, decoder.get("decoders") or []))


def _named(vocabulary: Mapping[str, int], names: Iterable[Any]) -> int | None:
    """The id of the first of these names that the vocabulary has."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raises ArtefactError if a library fails on a file or a text.

    `tokenizers` is written in Rust, whose panics are not a subclass of Exception.
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
