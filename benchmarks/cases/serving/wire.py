"""Many requests at once from one thread: sockets that do not block, and a loop over those that are ready.

An answer is read while it arrives, with the server-sent events in it.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECEIVE = 1 << 18  # bytes at once
SILENCE = 600.0  # seconds without a byte from the server after which it is given up
END_OF_EVENT = b"\n\n"


class LoadError(Exception):
    """A server has not answered as it should; the message says how, in one sentence."""


class Answer:
    """One answer. `feed` takes what a socket has received.

    status: of HTTP; 0 before it is known. events: those that have arrived whole, without what ends them.
    times: when each of them arrived. done: whether the answer has arrived whole.
    """

    def __init__(self) -> None:
        self.status = 0
        self.events: list[bytes] = []
        self.times: list[float] = []
        self.done = False
        self._body = bytearray()
        self._has_events = False
        import httptools

        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes, now: float) -> int:
        """Takes bytes that arrived at `now`; returns how many events they have completed."""
        self._parser.feed_data(data)
        if not self._has_events:
            return 0
        *whole, rest = bytes(self._body).split(END_OF_EVENT)
        self.events += whole
        self.times += [now] * len(whole)
        self._body = bytearray(rest)
        return len(whole)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._has_events = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.done = True

    @property
    def body(self) -> bytes:
        """The bytes of an answer without events, so far."""
        return bytes(self._body)

    def content(self) -> bytes:
        """The bytes of a whole answer without events; raises LoadError where it is a refusal."""
        if not self.done:
            raise LoadError("the server has ended a connection before its answer was whole.")
        if self.status not in (200, 201):
            raise LoadError(f"the server has answered {self.status}: {bytes(self._body)[:300]!r}.")
        return bytes(self._body)

    def document(self) -> Any:
        """The answer as one JSON document; raises LoadError where it is none, or where it is a refusal."""
        return json.loads(self.content())

    def completion(self) -> tuple[list[str], list[float]]:
        """The text and the time of each token of a stream; raises LoadError if it has failed."""
        if self.status != 200 or not self.done:
            raise LoadError(f"a stream has not ended: {self.status} {bytes(self._body)[:300]!r}.")
        texts = list[str]()
        times = list[float]()
        for event, when in zip(self.events, self.times, strict=True):
            if event == b"data: [DONE]":
                continue
            document = json.loads(event.removeprefix(b"data: "))
            if "error" in document:
                raise LoadError(f"a stream has failed: {document['error']}.")
            for choice in document["choices"]:
                if choice["text"]:
                    texts.append(choice["text"])
                    times.append(when)
        return texts, times


class Request:
    """One request on a connection of its own, and its answer.

    body: bytes as they are, or what becomes JSON. key: of the API. count: events that have arrived. sent:
    when the request was sent. ended: when the answer was whole, or when `leave` was called.
    """

    def __init__(self, port: int, method: str, path: str, body: Any = None, *, key: str = "") -> None:
        self.answer = Answer()
        self.count = 0
        self.ended: float | None = None
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        head += f"authorization: Bearer {key}\r\n" if key else ""
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.sent = time.perf_counter()
        self.socket.sendall(head.encode() + content)
        self.socket.setblocking(False)

    def leave(self) -> None:
        """Cuts the connection, as a client does that has crashed."""
        with contextlib.suppress(OSError):  # the server has ended it before
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        self.ended = time.perf_counter()


class Loop:
    """Reads the answers of requests. `run` returns when none is left."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.requests: set[Request] = set()

    def add(self, requests: Iterable[Request]) -> None:
        """Reads the answers of these requests too."""
        for request in requests:
            self.requests.add(request)
            self._selector.register(request.socket, selectors.EVENT_READ, request)

    def leave(self, request: Request) -> None:
        """Cuts the connection of a request in the middle of its answer."""
        self._selector.unregister(request.socket)
        self.requests.remove(request)
        request.leave()

    def run(
        self, each: Callable[[list[Request]], None] = lambda ready: None, *, silence: float = SILENCE
    ) -> None:
        """Reads until every answer is whole. each: called with the requests of which something has arrived,
        each time; it may add requests and leave some.

        Raises LoadError if the server ends a connection early, or is silent for so many seconds.
        """
        while self.requests:
            ready = [key.data for key, _ in self._selector.select(silence)]
            if not ready:
                raise LoadError(f"the server was silent for {silence:g} seconds.")
            for request in ready:
                self._read(request)
            each(ready)

    def _read(self, request: Request) -> None:
        try:
            data = request.socket.recv(RECEIVE)
        except BlockingIOError:
            return
        now = time.perf_counter()
        if data:
            request.count += request.answer.feed(data, now)
        if request.answer.done or not data:
            if not request.answer.done:
                raise LoadError("the server has ended a connection before its answer was whole.")
            self._selector.unregister(request.socket)
            self.requests.remove(request)
            request.socket.close()
            request.ended = now


def asked(
    port: int, method: str, path: str, body: Any = None, *, key: str = "", silence: float = SILENCE
) -> Answer:
    """The whole answer to one request. silence: seconds without a byte after which the client leaves."""
    loop = Loop()
    loop.add([request := Request(port, method, path, body, key=key)])
    try:
        loop.run(silence=silence)
    finally:
        request.socket.close()
    return request.answer


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process; Linux only."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock of a process, as clock_getcpuclockid makes it


def resident_bytes(pid: int) -> int:
    """The physical memory that a process holds; Linux only."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024
