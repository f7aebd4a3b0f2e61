"""One client sends as much as it may, of one kind, and another one asks for little: how long that one waits.

Part of the load process: raw sockets and Python's own library alone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases.serving.wire import LoadError, resident_bytes

Job = dict[str, Any]
TEXT = "Once upon a time there was a girl who lived in a house near the woods, and she had a dog.\n"
PROBED = 0.02  # seconds between two questions of the other client
IDLE = 30  # questions of each kind to an idle server


def of_size(characters: int) -> str:
    """A text of so many characters."""
    return (TEXT * (characters // len(TEXT) + 1))[:characters]


def _text(size: int) -> bytes:
    return json.dumps({"prompt": of_size(size)}).encode()


def _ids(count: int) -> bytes:
    return b'{"prompt":[' + b",".join([b"1"] * count) + b'],"max_tokens":1}'


def _lists(size: int) -> bytes:
    return b'{"prompt":[' + b",".join([b"[]"] * (size // 3 - 10)) + b"]}"


def _decoded(count: int) -> bytes:
    return b'{"tokens":[' + b",".join([b"%d" % (300 + at % 700) for at in range(count)]) + b"]}"


def _scored(count: int) -> bytes:
    return json.dumps({"texts": [of_size(300 + at % 300) for at in range(count)], "tokens": True}).encode()


# What is sent, eight at a time: the path, and what makes the body.
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "texts of 3 MB": ("/tokenize", lambda: _text(3_000_000)),
    "a text of 16 MB": ("/tokenize", lambda: _text(16_500_000)),
    "1,000,000 ids": ("/v1/completions", lambda: _ids(1_000_000)),
    "ids of 16 MB": ("/v1/completions", lambda: _ids(8_300_000)),
    "empty lists of 16 MB": ("/v1/completions", lambda: _lists(16_500_000)),
    "200,000 ids to decode": ("/detokenize", lambda: _decoded(200_000)),
    "4,096 texts to score": ("/v1/score", lambda: _scored(4096)),
}


def stall(job: Job) -> Job:
    """Milliseconds of the questions of one client, alone and while another one attacks for `seconds`.

    attack: of `ATTACKS`, `at_once` requests of which are under way all the time; or `snapshots`, which are
    uploaded; or `headers`, of 60 MB each. resident: the most bytes that the server has held, over those
    before.
    """
    before = resident_bytes(job["pid"])
    questions = _questions(job)
    idle = {name: _asked(job, request, lambda asked: asked >= IDLE) for name, request in questions.items()}
    attack = _attack_of(job)
    end = time.perf_counter() + job["seconds"]
    busy: dict[str, list[float]] = {}

    def ask(name: str) -> None:
        busy[name] = _asked(job, questions[name], lambda asked: time.perf_counter() > end)

    threads = [threading.Thread(target=_attack, args=(job, attack, end)) for _ in range(job["at_once"])]
    threads += [threading.Thread(target=ask, args=(name,)) for name in questions]
    for thread in threads:
        thread.start()
    most = before
    while any(thread.is_alive() for thread in threads):
        most = max(most, resident_bytes(job["pid"]))
        time.sleep(PROBED)
    return {"idle": idle, "busy": busy, "resident": most - before}


def _attack_of(job: Job) -> bytes:
    """One request of the attack, whole."""
    name = job["attack"]
    key = job["keys"][0]
    if name == "headers of 60 MB":
        return _head(job, "GET", "/v1/models", key, 0)[:-2] + b"x: " + b"x" * 60_000_000 + b"\r\n\r\n"
    if name == "snapshots":
        head = _head(job, "POST", "/v1/streams", key, 2)
        stream = json.loads(_answered(job, head + b"{}"))["stream"]["id"]
        head = _head(job, "GET", f"/v1/streams/{stream}/snapshot", key, 0)
        body = _answered(job, head)
        path = "/v1/streams/restore"
    else:
        path, made = ATTACKS[name]
        body = made()
    return _head(job, "POST", path, key, len(body)) + body


def _attack(job: Job, request: bytes, end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        # The server may refuse before it has read everything; at the end the client leaves.
        with contextlib.suppress(OSError):
            _answered(job, request, left)


def _questions(job: Job) -> dict[str, bytes]:
    body = _text(5000)
    key = job["keys"][1]
    short = _head(job, "POST", "/tokenize", key, len(body)) + body
    return {"health": _head(job, "GET", "/health", key, 0), "short": short}


def _asked(job: Job, request: bytes, is_over: Callable[[int], bool]) -> list[float]:
    """The milliseconds of each answer to a question, until it is over."""
    found: list[float] = []
    while not is_over(len(found)):
        began = time.perf_counter()
        _answered(job, request)
        found.append((time.perf_counter() - began) * 1e3)
        time.sleep(PROBED)
    return found


def _head(job: Job, method: str, path: str, key: str, length: int) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{job['port']}\r\nconnection: close\r\n"
    return f"{head}authorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n".encode()


def _answered(job: Job, request: bytes, seconds: float | None = None) -> bytes:
    """The body of the answer to a request; raises OSError where nothing comes for so many seconds."""
    with socket.create_connection(("127.0.0.1", job["port"]), timeout=seconds) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        parts = []
        while part := connection.recv(1 << 18):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise LoadError("the server has ended a connection without an answer.")
    return body
