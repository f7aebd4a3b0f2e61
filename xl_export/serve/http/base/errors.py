"""The answer to a request that cannot be served: one sentence, in the form of OpenAI's errors."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from starlette.responses import Response

from runtimes.base.errors import UserError
from runtimes.contract.spec import NoLanguageModelError
from xl_export.serve.core.admission import QueueFullError, StoppedError
from xl_export.serve.core.task import Ended
from xl_export.serve.streams.database import DamagedStreamError, UnreadableError, UnwritableError
from xl_export.serve.streams.store import (
    BusyStreamError,
    ClosedStoreError,
    JournalError,
    NoStreamError,
    TooManyStreamsError,
)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Of each error of an engine or a store: the status of HTTP, a word for programs, and after how many seconds
# the same request may succeed. Any other UserError is the fault of the request.
ANSWERS: tuple[tuple[type[UserError], int, str, float | None], ...] = (
    (QueueFullError, 429, "queue_full", None),
    (StoppedError, 503, "stopping", 5.0),
    (NoStreamError, 404, "stream_not_found", None),
    (DamagedStreamError, 410, "stream_damaged", None),
    (UnreadableError, 503, "stream_unreadable", None),
    (BusyStreamError, 409, "stream_busy", 1.0),
    (JournalError, 409, "other_artefact", None),
    (TooManyStreamsError, 403, "too_many_streams", None),
    (UnwritableError, 507, "disk_full", None),
    (ClosedStoreError, 503, "stopping", None),
)


def doc(text: str) -> msgspec.Meta:
    """The description of a field, in its annotation."""
    return msgspec.Meta(description=text)


class ErrorFacts(msgspec.Struct, kw_only=True):
    """What is wrong with a request."""

    message: Annotated[str, doc("What is wrong, and how to fix it.")]
    type: Annotated[str, doc("The kind of error.")]
    param: Annotated[str | None, doc("The field of the body that is wrong.")]
    code: Annotated[str | None, doc("A word for programs.")]
    position: Annotated[
        int | msgspec.UnsetType, doc("The position of the stream, if the request gave another.")
    ] = msgspec.UNSET


class Error(msgspec.Struct):
    """The answer to a request that is refused."""

    error: Annotated[ErrorFacts, doc("What is wrong with the request.")]


class PlainError(msgspec.Struct):
    """The answer to a request that is refused, in the Open Inference Protocol."""

    error: Annotated[str, doc("What is wrong, and how to fix it.")]


class RefusedError(Exception):
    """A request that is not served. Its message is one sentence: what was given, what was expected, how to
    fix it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        closes: bool = False,
        allow: str | None = None,
        position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """The status of HTTP."""
        self.param = param
        """The field of the body that is wrong."""
        self.code = code
        """A word for programs."""
        self.retry_after = retry_after
        """Seconds after which the same request may succeed."""
        self.closes = closes
        """Whether the connection ends with the answer, because the rest of the request is not read."""
        self.allow = allow
        """The methods that the path has."""
        self.position = position
        """The position of the stream, if the request gave another."""

    def document(self) -> Error:
        """The answer, for JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        position = msgspec.UNSET if self.position is None else self.position
        return Error(
            ErrorFacts(message=self.message, type=kind, param=self.param, code=self.code, position=position)
        )

    def response(self, *, plain: bool = False) -> Response:
        """The whole answer, with `Retry-After` if it is known. plain: with the sentence as its only field."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 415:
            headers["accept-encoding"] = "identity"
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.closes:
            headers["connection"] = "close"
        body = msgspec.json.encode(PlainError(self.message) if plain else self.document())
        return Response(body, self.status, headers, "application/json")


def has_plain_errors(path: str) -> bool:
    """Whether the error in an answer is only its sentence, as in the Open Inference Protocol. Its clients
    fail at any other one, so this also holds for paths below `/v2` that do not exist.
    """
    return f"{path}/".startswith("/v2/")


def refusal_of(error: RefusedError | UserError) -> RefusedError:
    """The answer to a request that ended with this error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, NoLanguageModelError):
        return RefusedError(f"{error.step}; send its inputs to /v1/streams/ID/step.")
    for kind, status, code, after in ANSWERS:
        if isinstance(error, kind):
            after = error.retry_after if isinstance(error, QueueFullError) else after
            return RefusedError(str(error), status=status, code=code, retry_after=after)
    return RefusedError(str(error))


def refuse_failure(ended: Ended) -> None:
    """Raises RefusedError or StoppedError if a task ended because of the server."""
    if ended.reason == "failed":
        raise RefusedError(ended.error or "the engine failed; see the log.", status=500, code="engine_failed")
    if ended.reason == "cancelled" and ended.error:  # by the engine, and not because the server stops
        raise RefusedError(ended.error, status=503, code="not_read")
    if ended.reason in ("stopped", "cancelled"):
        raise StoppedError
