"""The process that puts load on a server, so that neither the server nor the benchmark waits for it.

`python -m benchmarks.serving.load` reads a job as JSON from standard input: `port`, `pid`, `bodies` of
completions that are streamed at once, and a window from when each stream has `warm` events to when one has
`until`. It prints JSON: what happened in the window, and the texts of all streams; or an `error`. It uses raw
sockets and Python's own library only.
"""

from __future__ import annotations

import http.client
import io
import json
import selectors
import socket
import sys
import time
from typing import Any

PATH = "/v1/completions"
READ_BYTES = 1 << 18
SILENCE_SECONDS = 600.0  # without a byte from the server, after which it is given up


class LoadError(Exception):
    """A server has not answered as it should."""


class Stream:
    """A streamed completion on a connection of its own, and the bytes of its answer."""

    def __init__(self, port: int, body: Any) -> None:
        self.events = 0
        self._bytes = bytearray()
        content = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(head.encode() + content)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Takes what has arrived; returns whether the server has closed the connection."""
        data = self.socket.recv(READ_BYTES)
        # An event ends with an empty line, which may arrive in two parts.
        self.events += (self._bytes[-1:] + data).count(b"\n\n")
        self._bytes += data
        return not data

    def texts(self) -> list[str]:
        """The text of each token; raises LoadError if the stream is not whole, or has failed."""
        response = http.client.HTTPResponse(_Received(self._bytes))  # type: ignore[arg-type]
        try:
            response.begin()
            content = response.read().decode()
        except http.client.HTTPException as error:
            raise LoadError(
                f"the server has ended a connection before its answer was whole: {error!r}"
            ) from error
        if response.status != 200:
            raise LoadError(f"the server has answered {response.status}: {content[:300]}")
        texts = []
        for event in content.split("\n\n"):
            document = event.removeprefix("data: ")
            if document not in ("", "[DONE]"):
                if "error" in (found := json.loads(document)):
                    raise LoadError(f"a stream has failed: {found['error']}")
                texts += [choice["text"] for choice in found["choices"] if choice["text"]]
        if not content.endswith("data: [DONE]\n\n"):
            raise LoadError("a stream has no end")
        return texts


class _Received:
    """What `http.client` reads in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def load(job: dict[str, Any]) -> dict[str, Any]:
    """The tokens, seconds and CPU seconds of the server in the window, and the texts of all streams."""
    streams = [Stream(job["port"], body) for body in job["bodies"]]
    first: tuple[float, ...] | None = None
    last: tuple[float, ...] | None = None
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = [key.data for key, _ in selector.select(SILENCE_SECONDS)]
            if not ready:
                raise LoadError(f"the server was silent for {SILENCE_SECONDS:g} seconds")
            for stream in ready:
                if stream.read():
                    selector.unregister(stream.socket)
                    stream.socket.close()
            if first is None:
                if min(stream.events for stream in streams) >= job["warm"]:
                    first = _now(job["pid"], streams)
            elif last is None and max(stream.events for stream in streams) >= job["until"]:
                last = _now(job["pid"], streams)
    texts = [stream.texts() for stream in streams]
    if first is None or last is None:
        raise LoadError("the streams were too short or too uneven to be measured; give more --repeats")
    names = ("tokens", "seconds", "server_cpu_seconds")
    return {"window": {name: b - a for name, a, b in zip(names, first, last, strict=True)}, "texts": texts}


def _now(pid: int, streams: list[Stream]) -> tuple[float, ...]:
    # The clock of another process, as clock_getcpuclockid makes it; Linux only.
    cpu = time.clock_gettime(~pid << 3 | 2)
    return float(sum(stream.events for stream in streams)), time.perf_counter(), cpu


def main() -> None:
    """Does the job; an error is a document with the field `error`."""
    try:
        answer = load(json.loads(sys.stdin.read()))
    except (LoadError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
