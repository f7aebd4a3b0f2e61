"""What clients ask of streams, over HTTP and over a WebSocket."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from runtimes.contract.session import Session
from runtimes.contract.vocabulary import Vocab
from xl_export.serve.core.task import Drawing
from xl_export.serve.http.base.encoding import encoding
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import Limits, refuse_log_probs
from xl_export.serve.http.base.workers import Steps
from xl_export.serve.http.openai.plan import DEFAULT_TOKENS, MOST_LIKELIEST, SamplingFields, drawing_of


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """text, tokens: what is appended to the stream, as a text or as token ids. surprisal: whether the
    surprisal of each token is wanted. alternatives: how many of the likeliest tokens are wanted beside it.
    """

    text: str | None = None
    tokens: list[int] | None = None
    surprisal: bool = True
    alternatives: int = 0


class CreateBody(Fields, forbid_unknown_fields=True, kw_only=True):
    """A new stream, which may begin with a text or tokens."""

    model: str | None = None


class AppendBody(Fields, forbid_unknown_fields=True, kw_only=True):
    """Appends to a stream. position: of the stream before, so that a request that is sent again feeds nothing
    twice.
    """

    position: int | None = None


class ContinueBody(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Appends, where there is a text or tokens, and then continues the stream. position: as in appends. The
    other fields are those of completions.
    """

    position: int | None = None
    text: str | None = None
    tokens: list[int] | None = None
    surprisal: bool = True
    alternatives: int = 0
    max_tokens: int = DEFAULT_TOKENS
    stream: bool = False


class RewindBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """tokens: how many of its last tokens the stream takes back."""

    tokens: int


class ElsewhereError(RefusedError):
    """The stream is not at the position that the request says."""

    def __init__(self, position: int, given: int) -> None:
        super().__init__(
            f"the stream has had {position} tokens and the request says {given}; where these are the tokens "
            "of this request, it was done before, and otherwise go on from there.",
            status=409,
            param="position",
            code="other_position",
        )
        self._position = position

    def body(self) -> bytes:
        """The JSON document of the answer, with the position of the stream."""
        document = msgspec.json.decode(super().body())
        document["error"]["position"] = self._position
        return msgspec.json.encode(document)


class NoBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing is asked for but the operation itself."""


def tokens_of(
    body: Fields | ContinueBody, vocab: Vocab, limits: Limits, *, needed: bool
) -> Steps[np.ndarray]:
    """The token ids int64 [N] that are appended; raises RefusedError for what cannot be appended."""
    if body.text is not None and body.tokens is not None:
        raise RefusedError("text and tokens are both given; leave one of them out.", param="tokens")
    if not 0 <= body.alternatives <= MOST_LIKELIEST:
        raise RefusedError(
            f"alternatives is {body.alternatives}; expected 0 to {MOST_LIKELIEST}.", param="alternatives"
        )
    if body.alternatives and not body.surprisal:
        raise RefusedError(
            "alternatives are given beside surprisals; leave surprisal out, or set it to true.",
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
    tokens = yield from encoding(vocab, given, what=name, param=name, limits=limits)
    drawn = body.max_tokens if isinstance(body, ContinueBody) and not body.stream else 0
    refuse_log_probs(limits, len(tokens) + drawn, body.alternatives, "alternatives")
    return tokens


def drawing_in(body: ContinueBody, session: Session, limits: Limits) -> Drawing:
    """How a stream is continued; raises RefusedError for fields that cannot be served."""
    if not 1 <= body.max_tokens <= limits.max_tokens:
        raise RefusedError(
            f"max_tokens is {body.max_tokens}; expected 1 to {limits.max_tokens}.", param="max_tokens"
        )
    return drawing_of(body, session, body.max_tokens)
