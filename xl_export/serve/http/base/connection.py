"""A connection of HTTP/1.1: bounds on heads and slow clients, and events that are written at once.

This extends uvicorn's protocol class, which is not a public interface: pyproject.toml limits uvicorn's
version. uvicorn has no public way to bound the head of a request, to end a connection, or to write without
one coroutine for each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.limits import Limits

CONNECTION = "xl_export.connection"  # the key of the `Wire` of a request in ASGI's `scope["extensions"]`
PART = 1 << 14  # bytes that the parser is given at once
LITTLE = 1 << 10  # bytes; so much may a head exceed its limit before that is noticed
TOO_LARGE_HEAD = RefusedError(
    "the head of the request, or of the chunks and trailers of its body, is too large, or has too many "
    "headers; send fewer and shorter ones.",
    status=431,
    code="headers_too_large",
    closes=True,
)
NOT_HTTP = RefusedError("the request is not HTTP/1.1; send one that is.", code="not_http", closes=True)


class Config(uvicorn.Config):
    """uvicorn's settings, and the limits of a connection."""

    def __init__(self, app: Any, limits: Limits, **settings: Any) -> None:
        super().__init__(app, http=Connection, **settings)
        self.limits = limits


class Connection(HttpToolsProtocol):
    """Ends connections whose client sends the head of a request too slowly, or the rest of one that was
    answered before all of it was there, or too many bytes that are no part of a body.

    uvicorn and httptools keep the head of a request of any size, before any key is checked.
    """

    config: Config
    #: Whether the client has left or was cut off.
    lost = False
    #: The task that is cancelled then.
    answering: asyncio.Task[Any] | None = None
    _cutting: asyncio.TimerHandle | None = None
    _whole = True  # whether the next byte begins a request
    _overhead = 0  # bytes of a head, of the frame of a chunk or of trailers, since the last byte of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.limits.connections:
            transport.abort()
            return
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a dead client
        self._cut_after(self.config.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        limits = self.config.limits
        self._cut_after(limits.header_seconds if self._whole else limits.body_seconds)
        # The parser is given parts, so that it never holds much more than was counted: parts up to the
        # limit, and then a little at a time.
        at = 0
        while at < len(data):
            part = data[at : at + max(LITTLE, min(PART, limits.header_bytes - self._overhead))]
            at += len(part)
            self._overhead += len(part)
            super().data_received(part)
            if self.transport.is_closing():
                return  # it was refused
            if self._overhead > limits.header_bytes:
                return self._refuse(TOO_LARGE_HEAD)

    def send_400_response(self, msg: str) -> None:
        self._refuse(NOT_HTTP)

    def on_message_begin(self) -> None:
        self._whole = False
        self._cut_after(self.config.limits.header_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._overhead = 0
        self._arrived()
        super().on_headers_complete()
        self.scope["extensions"] = {CONNECTION: Wire(self, self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._whole = True
        self._overhead = 0
        self._arrived()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)
        self.lost = True
        if self.answering is not None:
            self.answering.cancel()

    def _refuse(self, refusal: RefusedError) -> None:
        """Answers in place of the application, unless that has begun to, and ends the connection."""
        if self.pipeline:  # an earlier request is still being answered, and its answer would be mixed up
            return self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                return self.transport.abort()
        response = refusal.response()
        head = STATUS_LINE[refusal.status]
        lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([head, *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def _cut_after(self, seconds: float) -> None:
        """Cuts the connection after `seconds`, unless that is planned or an answer is not whole."""
        if self._cutting is None and (self.cycle is None or self.cycle.response_complete):
            self._cutting = self.loop.call_later(seconds, self.transport.abort)

    def _arrived(self) -> None:
        """What was waited for is there."""
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None


class Wire:
    """The connection as the application uses it while it answers one request."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._flow = connection.flow
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Writes a chunk of an answer that has begun, as `cycle.send` does without its coroutine; returns
        False if the client has not accepted what was written before.
        """
        if self._flow.write_paused or self._cycle.disconnected or not self._cycle.chunked_encoding:
            return False
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))
        return True

    @contextlib.contextmanager
    def cancelled_when_lost(self) -> Iterator[None]:
        """Cancels the block, and raises ClientLeftError, when the client leaves or is cut off."""
        self._connection.answering = asyncio.current_task()
        try:
            if self._connection.lost:
                raise asyncio.CancelledError  # while the body was decoded
            yield
        except asyncio.CancelledError:
            if self._connection.lost:
                self._cycle.disconnected = True  # uvicorn notes it only for the last request that has come
                raise ClientLeftError from None
            raise
        finally:
            self._connection.answering = None

    def cut(self) -> None:
        """Cuts the connection; uvicorn then does not expect the rest of the answer."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self._transport.abort()
