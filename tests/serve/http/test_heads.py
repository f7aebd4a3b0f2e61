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
from tests.serve.http.test_clients import comes_true, connection, head, is_idle, wait_for
from xl_export.serve.core.settings import Limits

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
UPLOAD = CHUNKED.replace(b"/tokenize", b"/v1/completions")
MANY = Limits().header_bytes
# The last part goes beyond the limit. What a server has not read when it closes
# makes the kernel drop the answer.
PARTS = MANY // 1000 + 1


@pytest.fixture(scope="module")
def server(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = tmp_path_factory.mktemp("state")
    with running(sources(("m", artefacts["ring"])), state=state) as server:
        yield server


def answer(server: Running, *parts: bytes) -> bytes:
    """All that the server says until it ends the connection. It may do so before all was sent."""
    heard = b""
    for _ in range(5):  # the kernel drops an answer if the server closes before it has read everything
        with connection(server) as client:
            with contextlib.suppress(ConnectionError):  # what it has said by then can still be read
                for part in parts:
                    client.sendall(part)
            with contextlib.suppress(ConnectionError):
                while part := client.recv(1 << 16):
                    heard += part
        if heard:
            break
    return heard


def headers(count: int, size: int = 1000) -> list[bytes]:
    return [b"%s: %s\r\n" % (b"h%d" % at, b"x" * (size - 8)) for at in range(count)]


TOO_LARGE = {
    "many headers": [GET, *headers(PARTS)],
    "a long header": [GET + b"h: ", *[b"x" * 1000] * PARTS],
    "empty lines before a request": [*[b"\r\n" * 500] * PARTS],
    "an extension of a chunk": [CHUNKED, b"5;", *[b"x" * 1000] * PARTS],
    "trailers": [CHUNKED, b"2\r\n{}\r\n0\r\n", *headers(PARTS)],
    "no HTTP": [b"HELLO\r\n\r\n"],
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_no_body_is_refused_beyond_64_kilobytes(server: Running, what: str) -> None:
    assert answer(server, *TOO_LARGE[what]).startswith(b"HTTP/1.1 400 ")
    assert comes_true(lambda: is_idle(server))


def test_what_is_no_http_behind_an_answer_ends_the_connection(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with connection(server) as client:
        client.sendall(CHUNKED.replace(b"/tokenize", b"/nothing"))
        wait_for(client, b"}}")
        client.sendall(b"no length\r\n")
        assert client.recv(1) == b""
    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert comes_true(lambda: is_idle(server))


def test_less_is_served_also_in_many_chunks(server: Running) -> None:
    closing = b"Connection: close\r\n\r\n"
    assert answer(server, GET, *headers(60), closing).startswith(b"HTTP/1.1 200 ")
    text = json.dumps({"prompt": "a" * 20_000}).encode()
    chunks = [b"1;%s\r\n%c\r\n" % (b"x" * 10, each) for each in text]  # far more than 64 KB beside the body
    chunked = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + closing)
    assert b'"count":20000' in answer(server, chunked, b"".join(chunks), b"0\r\n", *headers(60), b"\r\n")


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
            assert comes_true(lambda: server.server.requests.total == len(clients))
        for client in clients:
            if not leaves:
                assert wait_for(client, b"\r\n\r\n").split()[1] == b"413"
            client.close()
        assert comes_true(lambda: is_idle(server))

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
