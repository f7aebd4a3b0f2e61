"""What clients ask of streams, and what is answered."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from runtimes.base.errors import ArtefactError
from runtimes.base.tensors_file import tensors_in_bytes, write_tensors
from runtimes.contract.vocabulary import Vocab
from xl_export.serve.core.settings import Limits
from xl_export.serve.core.task import Answer, PromptFed, Reason, TokenOut
from xl_export.serve.http.base.encoding import encoding
from xl_export.serve.http.base.errors import RefusedError, doc
from xl_export.serve.http.base.limits import decoded, refuse_long_answer
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.token_log import TokenLog, TokenTexts
from xl_export.serve.http.base.workers import off_loop, size_of_tokens
from xl_export.serve.http.openai.plan import (
    AT_LEAST_0,
    AT_LEAST_1,
    DEFAULT_TOKENS,
    MOST_LIKELIEST,
    SamplingFields,
)
from xl_export.serve.streams.database import Stream

LONGEST_NUMBER = 18  # digits
SAFETENSORS = "application/safetensors"  # the content type of a file of arrays
encode = msgspec.json.Encoder().encode
# The fields that both `Fields` and `ContinueBody` have; a msgspec.Struct cannot have two bases with fields.
Text = Annotated[str | None, doc("A text to append, which is encoded with the vocabulary of the model.")]
Tokens = Annotated[list[int] | None, doc("Token ids to append.")]
Surprisal = Annotated[bool, doc("Whether the surprisal of each token is returned, in bits.")]
Alternatives = Annotated[
    int,
    msgspec.Meta(ge=0, le=MOST_LIKELIEST),
    doc("How many of the likeliest tokens to return for each token."),
]
Position = Annotated[
    Annotated[int, AT_LEAST_0] | None,
    doc("How many tokens the stream has had before this request; another number is an error."),
]


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is appended to a stream, as a text or as token ids, and what is returned for it."""

    text: Text = None
    tokens: Tokens = None
    surprisal: Surprisal = True
    alternatives: Alternatives = 0


class CreateBody(Fields, forbid_unknown_fields=True, kw_only=True):
    """A new stream, which may begin with a text or tokens."""

    model: Annotated[str | None, doc("A name from /v1/models; without it the first model answers.")] = None


class AppendBody(Fields, forbid_unknown_fields=True, kw_only=True):
    """Appends to a stream. With the position, a request that is sent again feeds nothing twice."""

    position: Position = None


class ContinueBody(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Appends, if there is a text or tokens, and then continues the stream. The other fields are as in
    completions.
    """

    position: Position = None
    text: Text = None
    tokens: Tokens = None
    surprisal: Surprisal = True
    alternatives: Alternatives = 0
    max_tokens: Annotated[int, AT_LEAST_1, doc("The most tokens to draw.")] = DEFAULT_TOKENS
    stream: Annotated[bool, doc("Whether tokens come as server-sent events when they are drawn.")] = False


class RewindBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Takes back the last tokens of a stream."""

    tokens: Annotated[int, AT_LEAST_0, doc("How many of the last tokens to take back.")]


class StepBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A step of a stream whose model has named inputs."""

    inputs: Annotated[
        dict[str, Any],
        doc("Nested lists by the names of the inputs, in the shapes of /v2/models/NAME, whose batch is 1."),
    ]
    position: Position = None


def step_body(body: bytearray, headers: Mapping[str, str], limits: Limits) -> StepBody:
    """The body of a step, in JSON or as a file of safetensors, whose metadata may have the position."""
    if headers.get("content-type") != SAFETENSORS:
        return decoded(body, StepBody)
    try:
        arrays, texts = tensors_in_bytes(body, Path("the body"))
    except ArtefactError as error:
        raise RefusedError(
            "the body is not a safetensors file of arrays of int64, float32, float16 or int8; send one that "
            "has an array for each input."
        ) from error
    position = texts.get("position")
    if position is not None and not (position.isdecimal() and len(position) <= LONGEST_NUMBER):
        raise RefusedError(f"position is {position!r:.40}; expected a number.", param="position")
    inputs = {name: array.copy() for name, array in arrays.items()}
    return StepBody(inputs=inputs, position=None if position is None else int(position))


class ElsewhereError(RefusedError):
    """The stream is not at the position that the request says."""

    def __init__(self, position: int, given: int) -> None:
        super().__init__(
            f"the stream is at position {position} and the request says {given}; if this request was sent "
            "before, it is done; otherwise go on from there.",
            status=409,
            param="position",
            code="other_position",
            position=position,
        )


def tokens_of(body: Fields | ContinueBody, vocab: Vocab, limits: Limits, *, needed: bool) -> np.ndarray:
    """The token ids int64 [N] that are appended; raises RefusedError for what cannot be appended."""
    if body.text is not None and body.tokens is not None:
        raise RefusedError("text and tokens are both given; leave one of them out.", param="tokens")
    if body.alternatives and not body.surprisal:
        raise RefusedError(
            "alternatives are returned with surprisals; leave surprisal out, or set it to true.",
            param="alternatives",
        )
    given: Any = body.tokens if body.text is None else body.text
    if not given:
        if needed or given is not None:
            raise RefusedError(
                "there is nothing to append; give text with at least one symbol, or tokens.", param="text"
            )
        return np.empty(0, np.int64)
    name = "tokens" if body.text is None else "text"
    tokens = encoding(vocab, given, what=name, param=name, limits=limits)
    drawn = body.max_tokens if isinstance(body, ContinueBody) and not body.stream else 0
    if body.alternatives:
        refuse_long_answer(limits, len(tokens) + drawn, body.alternatives, "alternatives")
    return tokens


class StreamDocument(msgspec.Struct, kw_only=True):
    """A stream as it is now."""

    id: Annotated[str, doc("The name of the stream.")]
    object: Annotated[Literal["stream"], doc("The kind of this document.")]
    model: Annotated[
        str | None, doc("The name of the model; null if none of the server's models can continue the stream.")
    ]
    usable: Annotated[bool, doc("Whether a model of the server can continue the stream.")]
    position: Annotated[int, doc("How many tokens the stream has had.")]
    created: Annotated[int, doc("Seconds since 1970.")]
    used: Annotated[
        int, doc("When the stream was used last, in seconds since 1970; after a restart, when last written.")
    ]
    in_memory: Annotated[bool, doc("Whether the next operation need not read the disk.")]
    busy: Annotated[bool, doc("Whether an operation runs on the stream.")]
    rewindable: Annotated[
        int | UnsetType, doc("How many of the stream's last tokens can be taken back exactly.")
    ] = UNSET
    artefact: Annotated[
        str | UnsetType,
        doc("The artefact that the stream belongs to, if no model of the server can continue it."),
    ] = UNSET


class StreamList(msgspec.Struct, kw_only=True):
    """The streams of a client."""

    object: Annotated[Literal["list"], doc("The kind of this document.")]
    data: Annotated[list[StreamDocument], doc("The streams.")]


class CancelledStream(msgspec.Struct, kw_only=True):
    """Whether an operation was cancelled."""

    id: Annotated[str, doc("The name of the stream.")]
    object: Annotated[Literal["stream.cancel"], doc("The kind of this document.")]
    cancelled: Annotated[bool, doc("Whether an operation ran on the stream; it ends now.")]


class DeletedStream(msgspec.Struct, kw_only=True):
    """A stream that was deleted."""

    id: Annotated[str, doc("The name of the stream.")]
    object: Annotated[Literal["stream"], doc("The kind of this document.")]
    deleted: Annotated[bool, doc("Whether the stream is deleted.")]


class CreateResult(msgspec.Struct, kw_only=True):
    """A new stream of a model with named inputs, which has been fed nothing."""

    object: Annotated[Literal["stream.create"], doc("The kind of this document.")]
    stream: Annotated[StreamDocument, doc("The stream.")]


class StepResult(msgspec.Struct, kw_only=True):
    """The stream after a step, and what the step returned."""

    object: Annotated[Literal["stream.step"], doc("The kind of this document.")]
    stream: Annotated[StreamDocument, doc("The stream after this request.")]
    outputs: Annotated[
        dict[str, Any],
        doc("Nested lists by the names of the outputs; an infinity is ±3.4e38, and a NaN null."),
    ]

    def safetensors(self) -> bytes:
        """The answer as a file of safetensors; its metadata has the other fields in JSON."""
        file = io.BytesIO()
        texts = {name: encode(getattr(self, name)).decode() for name in ("object", "stream")}
        write_tensors(file, self.outputs, texts)
        return file.getvalue()


class LikelyToken(msgspec.Struct, kw_only=True):
    """One of the likeliest tokens at a place."""

    token: Annotated[int, doc("The id of the token.")]
    text: Annotated[str, doc("The text of the token.")]
    bits: Annotated[float, doc("The surprisal of the token in bits.")]


class _Tokens(msgspec.Struct, kw_only=True):
    appended: Annotated[int, doc("How many of these tokens were fed; the others were drawn.")]
    tokens: Annotated[list[int], doc("The ids of the tokens.")]
    texts: Annotated[list[str], doc("The text of each token.")]
    bits: Annotated[
        list[float | None] | UnsetType,
        doc("The surprisal of each token in bits; null for a token with nothing before it."),
    ] = UNSET
    likeliest: Annotated[
        list[list[LikelyToken] | None] | UnsetType,
        doc("The likeliest tokens at each place; null at a place with nothing before it."),
    ] = UNSET


class _Result(_Tokens, kw_only=True):
    stream: Annotated[StreamDocument, doc("The stream after this request.")]
    total_bits: Annotated[float, doc("The sum of the surprisals of this request.")]
    counted: Annotated[int, doc("How many tokens total_bits is the sum of.")]


class AppendResult(_Result, kw_only=True):
    """The stream after an append, and the surprisals of its tokens."""

    object: Annotated[Literal["stream.append"], doc("The kind of this document.")]


class ContinueResult(_Result, kw_only=True):
    """The stream after it was continued, and what was appended and drawn."""

    object: Annotated[Literal["stream.continue"], doc("The kind of this document.")]
    finish_reason: Annotated[Reason, doc("Why the text ended, also if the server ended it.")]
    seed: Annotated[int, doc("The seed with which the same tokens are drawn again.")]
    text: Annotated[str, doc("What was drawn.")]
    error: Annotated[str | UnsetType, doc("Why the server ended the continuation; absent if it did not.")] = (
        UNSET
    )


class ContinueChunk(_Tokens, kw_only=True):
    """One server-sent event while a stream is continued. The last event is a ContinueResult, which has the
    rest; after it comes `[DONE]`.
    """

    object: Annotated[Literal["stream.chunk"], doc("The kind of this document.")]
    text: Annotated[str, doc("What is new of the text.")]


def stream_document(stream: Stream, model: Model | None) -> StreamDocument:
    """A stream as it is now. model: which continues it."""
    return StreamDocument(
        id=stream.id,
        object="stream",
        model=None if model is None else model.name,
        usable=model is not None and not stream.damaged,
        artefact=UNSET if model is not None else stream.computed_by.artefact,
        position=stream.position,
        created=int(stream.created),
        used=int(stream.used),
        in_memory=stream.state is not None,
        busy=stream.busy,
    )


def deleted_document(name: str) -> DeletedStream:
    """A stream that was deleted."""
    return DeletedStream(id=name, object="stream", deleted=True)


class Report:
    """The tokens of an operation and the text that it draws, in the form of streams.

    tokens: int64 [N], those that are fed. before: int64 [N], the tokens before them. surprisal: whether
    surprisals are wanted. alternatives: number of the likeliest tokens.
    """

    def __init__(
        self, texts: TokenTexts, tokens: np.ndarray, before: np.ndarray, *, surprisal: bool, alternatives: int
    ) -> None:
        self._texts = texts
        self._to_feed = tokens
        self._surprisal = surprisal
        self._alternatives = alternatives
        # The end of the tokens before may have no text yet.
        self._log = TokenLog(texts.vocab, before, shown=False, top=alternatives)
        self._text: list[str] = []  # what was drawn, without what may become a stop string
        self._appended = 0
        self._count = 0

    def note(self, answer: Answer) -> None:
        """Notes tokens that were fed, a token that was drawn, or the end."""
        if isinstance(answer, PromptFed):
            piece = self._to_feed[: answer.count]
            self._to_feed = self._to_feed[answer.count :]
            self._log.add(piece, answer.log_probs, answer.likeliest)
            self._appended += answer.count
            self._count += answer.count
            return
        self._text.append(answer.text)
        if isinstance(answer, TokenOut):
            self._log.add_drawn(answer)
            self._count += 1

    def take_text(self) -> str:
        """What was drawn since the last call."""
        text = "".join(self._text)
        self._text = []
        return text

    async def take(self) -> dict[str, Any]:
        """The fields of `_Tokens` for what was noted since the last call."""
        appended = self._appended
        count = self._count
        self._appended = self._count = 0
        return await off_loop(size_of_tokens(count, self._alternatives), self._fields, appended)

    def sum(self) -> dict[str, Any]:
        """The fields of `_Result` for all tokens."""
        return {"total_bits": _bits(self._log.total), "counted": self._log.known}

    def _fields(self, appended: int) -> dict[str, Any]:
        tokens = self._log.take()
        fields: dict[str, Any] = {"appended": appended, "tokens": tokens.ids, "texts": tokens.texts}
        if self._surprisal:
            fields["bits"] = [None if log_prob is None else _bits(log_prob) for log_prob in tokens.log_probs]
        if self._alternatives:
            fields["likeliest"] = [
                [
                    LikelyToken(token=other, text=self._texts.after(last, other), bits=_bits(log_prob))
                    for other, log_prob in likeliest
                ]
                or None
                for last, likeliest in zip([tokens.before, *tokens.ids], tokens.likeliest, strict=False)
            ]
        return fields


def _bits(log_prob: float) -> float:
    return -log_prob / math.log(2) + 0.0  # no -0.0
