"""What a small program costs that only steps a model and sends each token to its client.

`python -m benchmarks.serving.baseline_server ARTEFACT THREADS STREAMS` waits for this many
requests, steps their streams as one batch, and writes an event for each token, as the server does. It has no
scheduler, no sampling but the largest logit, no limits, and one thread; a client that reads nothing stops it.
A server in Python can hardly cost less. What a real one costs more is scheduling, sampling, limits and HTTP.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.server import Served, running
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-%s","object":"text_completion","created":%d,"model":"artefact","seed":%d,' % (
    b"0" * 24,
    10**9,
    10**9,
)
BEFORE = EVENT + b'"choices":[{"index":0,"text":" '
AFTER = b'","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
LAST = EVENT + b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'


def baseline_server(artefact: Path, *, threads: int, streams: int) -> AbstractContextManager[Served]:
    """While the block runs, a process of its own answers `streams` requests at a time."""
    command = [sys.executable, "-m", "benchmarks.serving.baseline_server", artefact, threads, streams]
    return running([*map(str, command)])


def answer(session: Session, listener: socket.socket, streams: int) -> None:
    """Answers one request on each of `streams` connections; all prompts have the same number of segments."""
    clients = [listener.accept()[0] for _ in range(streams)]
    bodies = [_body(client) for client in clients]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(HEAD)
    prompts = np.array([document["prompt"] for document in bodies])
    count = bodies[0]["max_tokens"]
    segment = session.rule.segment
    memory = session.start(streams)
    for first in range(0, prompts.shape[1], segment):
        logits, memory = session.predict(prompts[:, first : first + segment], memory)
    for drawn in range(count):
        tokens = logits.argmax(axis=1)
        for client, token in zip(clients, tokens.tolist(), strict=True):
            client.sendall(_chunk(b"%s%d%s" % (BEFORE, token, AFTER)))
        if drawn + 1 < count:
            logits, memory = session.predict(tokens[:, None], memory)
    for client in clients:
        client.sendall(_chunk(LAST + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        client.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _body(client: socket.socket) -> dict[str, Any]:
    """The document of a request."""
    with client.makefile("rb") as stream:
        stream.readline()
        headers = http.client.parse_headers(stream)
        document: dict[str, Any] = json.loads(stream.read(int(headers["content-length"])))
    return document


def main(artefact: str, threads: str, streams: str) -> None:
    """Answers until the process is ended."""
    session = open_session(Path(artefact), threads=int(threads), device="cpu")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            answer(session, listener, int(streams))


if __name__ == "__main__":
    main(*sys.argv[1:])
