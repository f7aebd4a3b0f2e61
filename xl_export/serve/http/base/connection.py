"""A client's connection: uvicorn's own protocol, with limits of time that its options do not have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import h11
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from xl_export.serve.core.settings import Limits

CONNECTION = "connection"  # the key of the `Connection` in `scope["state"]` of ASGI


class Timer:
    """Calls a function some seconds after `start`, unless it is stopped before."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._handle is not None

    def start(self) -> None:
        """Starts it, once."""
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def stop(self) -> None:
        """Stops it if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(asyncio.Protocol):
    """Passes what asyncio calls on to uvicorn, and closes the connections of three kinds of clients: one
    that sends the head of a request too slowly, one that does not read its answer, and one too many.

    connections: those that are open. app_state, options: what uvicorn gives to a protocol.
    """

    def __init__(
        self, connections: set[Connection], limits: Limits, *, app_state: dict[str, Any], **options: Any
    ) -> None:
        self._connections = connections
        self._limits = limits
        self._http = H11Protocol(app_state={**app_state, CONNECTION: self}, **options)
        self._transport: asyncio.Transport
        self._request: asyncio.Task[Any] | None = None  # that answers
        self._head_timer = Timer(limits.header_seconds, self.cut)
        self._read_timer = Timer(limits.stalled_seconds, self.cut)
        self.lost = False
        """Whether the client has left, or was disconnected."""

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered; the block is cancelled if the client leaves."""
        if self.lost:
            raise ClientDisconnect
        self._head_timer.stop()
        self._request = asyncio.current_task()
        try:
            yield
        finally:
            self._request = None

    def cut(self) -> None:
        """Disconnects the client at once."""
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._connections.add(self)
        self._http.connection_made(transport)
        self._head_timer.start()
        if len(self._connections) > self._limits.connections:
            self.cut()

    def data_received(self, data: bytes) -> None:
        # A head, or the rest of a body that was refused before it came.
        if self._request is None and not self._head_timer.runs:
            self._head_timer.start()
        try:
            self._http.data_received(data)
        except h11.LocalProtocolError:
            # uvicorn answers what is no HTTP with status 400, even if it has sent another answer already.
            self.cut()
        if self._transport.is_closing():
            self._end_request()

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._read_timer.start()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._read_timer.stop()
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._head_timer.stop()
        self._read_timer.stop()
        self._http.connection_lost(exc)
        self._end_request()

    def _end_request(self) -> None:
        """Cancels the answer, because its client has left."""
        self.lost = True
        if self._request is not None:
            self._request.cancel()
