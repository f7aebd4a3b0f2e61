"""The bytes of requests: of heads, frames of chunks and trailers, and of bodies."""

from __future__ import annotations

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.test_clients import SHORT, comes_true, connection, head, is_idle, wait_for
from xl_export.serve.http.base.connection import LITTLE, PART, HttpToolsProtocol
from xl_export.serve.http.base.limits import SMALL_BODY, Limits

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
UPLOAD = CHUNKED.replace(b"/tokenize", b"/v1/completions")
MANY = Limits().header_bytes
# The last part goes beyond the limit. What a server has not read when it closes
# makes the kernel drop the answer.
HEAD = -(-MANY // 1000)
PARTS = HEAD + 1 + PART // 1000  # behind a head: what arrives together with its end is not counted


@pytest.fixture(scope="module")
def server(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = tmp_path_factory.mktemp("state")
    limits = Limits(body_bytes=1 << 20, bodies_bytes=4 << 20)
    with running(sources(("m", artefacts["ring"])), state=state, limits=limits) as server:
        yield server


def answer(server: Running, *parts: bytes) -> bytes:
    """All that the server says until it ends the connection. It may do so before all was sent."""
    heard = b""
    for _ in range(5):  # the kernel drops an answer if the server closes before it has read everything
        with connection(server) as client, contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
            while part := client.recv(1 << 16):
                heard += part
        if heard:
            break
    return heard


def headers(count: int, size: int = 1000) -> list[bytes]:
    return [b"%s: %s\r\n" % (b"h%d" % at, b"x" * (size - 8)) for at in range(count)]


TOO_LARGE = {
    "many headers": [GET, *headers(HEAD)],
    "a whole head in one piece": [GET + b"h: " + b"x" * (MANY + LITTLE + 100) + b"\r\n\r\n"],
    "empty lines before a request": [*[b"\r\n" * 500] * HEAD],
    "an extension of a chunk": [CHUNKED, b"5;", *[b"x" * 1000] * PARTS],
    "trailers": [CHUNKED, b"2\r\n{}\r\n0\r\n", *headers(PARTS)],
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_no_body_is_refused_beyond_64_kilobytes(server: Running, what: str) -> None:
    start, _, body = answer(server, *TOO_LARGE[what]).partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in start
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert comes_true(lambda: is_idle(server) and not server.web.server_state.connections)


def test_the_parser_never_gets_more_than_was_counted(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    received = HttpToolsProtocol.data_received

    def noted(protocol: HttpToolsProtocol, data: bytes) -> None:
        given.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", noted)
    assert b" 431 " in answer(server, GET + b"h: " + b"x" * 3_000_000)
    assert sum(given) <= MANY + LITTLE


def test_less_is_served_also_in_many_chunks(server: Running) -> None:
    closing = b"Connection: close\r\n\r\n"
    assert answer(server, GET, *headers(60), closing).startswith(b"HTTP/1.1 200 ")
    text = json.dumps({"prompt": "a" * 20_000}).encode()
    chunks = [b"1;%s\r\n%c\r\n" % (b"x" * 10, each) for each in text]  # far more than 64 KB beside the body
    chunked = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + closing)
    assert b'"count":20000' in answer(server, chunked, b"".join(chunks), b"0\r\n", *headers(60), b"\r\n")


def test_what_is_not_http_is_told_so_in_json(server: Running) -> None:
    start, _, body = answer(server, b"HELLO\r\n\r\n").partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "not_http"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_comes_to_nothing_leaves_no_memory(server: Running, leaves: bool) -> None:
    """Not even until the garbage collector comes by, which may take long in a server that does little."""
    part = b"a" * (1 << 19)

    def crowd() -> None:
        clients = [connection(server) for _ in range(3)]
        for client in clients:
            if leaves:
                client.sendall(head(part, length=len(part) + 1))
            else:  # too large by one byte: what is left unread would reset the answer
                client.sendall(UPLOAD + 2 * (b"%x\r\n%s\r\n" % (len(part), part)) + b"1\r\na\r\n")
        if leaves:  # in the middle of its body, which is there
            assert comes_true(lambda: server.server.bodies.total == len(clients) * (len(part) - SMALL_BODY))
        for client in clients:
            if not leaves:
                assert wait_for(client, b"\r\n\r\n").split()[1] == b"413"
            client.close()
        assert comes_true(lambda: is_idle(server) and server.server.bodies.total == 0)

    crowd()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(2):
            crowd()
        # Less than a chunk of each body; a thread may hold the last one a moment longer.
        assert comes_true(lambda: tracemalloc.get_traced_memory()[0] < 6 * 30_000)
    finally:
        tracemalloc.stop()
        gc.enable()


def test_large_bodies_have_a_common_limit_and_small_ones_none(server: Running) -> None:
    waiting = [connection(server) for _ in range(4)]
    for client in waiting:
        client.sendall(head(b" " * 1_000_000, length=1_000_100))
    assert comes_true(lambda: server.server.bodies.total == 4 * (1_000_000 - SMALL_BODY))
    for _ in range(2):
        with connection(server) as client:
            client.sendall(head(b" " * 600_000, length=600_100))
            answer = wait_for(client, b"them has ended, or send less at once.")
            assert b"429" in answer.partition(b"\r\n")[0]
            assert b"retry-after: 1" in answer.lower()
    assert server.post("/v1/completions", SHORT).status_code == 200
    for client in waiting:
        client.close()
    assert comes_true(lambda: server.server.bodies.total == 0)
    body = {**SHORT, "user": "u" * 500_000}
    assert server.post("/v1/completions", body).status_code == 200
    assert comes_true(lambda: server.server.bodies.total == 0)
