"""Clients that leave, hang, crawl or come in crowds: none of them holds a row."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tests.coroutines import in_thread
from tests.serve.http.conftest import HTTP, Running, running, sources
from xl_export.serve.core.settings import Limits
from xl_export.serve.http.base.connection import CONNECTION
from xl_export.serve.http.base.context import RequestContext
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.serving import Address

LONG = {"prompt": "abc", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
LATE = Limits().header_seconds + 1  # longer than a head may take
PATIENCE = Limits().stalled_seconds
SHORT = {"prompt": "abcdefghijkl", "max_tokens": 30, "temperature": 1.0}


@pytest.fixture(scope="module")
def small(artefacts: dict[str, Path]) -> Iterator[Running]:
    """Two rows and four places in the queue."""
    limits = Limits(max_tokens=1_000_000, body_bytes=1 << 22)
    with running(
        sources(("m", artefacts["ring"]), rows=2, queue=4, unread=1 << 20), limits=limits, send_buffer=8192
    ) as server:
        yield server


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether something happens before everybody has lost patience."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def is_idle(server: Running) -> bool:
    model = server.server.models["m"]
    tasks = len(model.engine.scheduler.rows.runs) + model.engine.waiting
    return tasks == 0 and server.server.requests.total == 0 and not model.mailboxes.tasks


def connection(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def wait_for(client: socket.socket, words: bytes) -> bytes:
    """All that has come until these words, or the end of the connection."""
    answer = b""
    while words not in answer and (part := client.recv(1 << 16)):
        answer += part
    assert words in answer
    return answer


def pass_time(server: Running, client: socket.socket) -> None:
    """Lets time pass for the server until it sends something to the client, or cuts it."""
    while not select.select([client], [], [], 0.01)[0]:
        server.skip(1)


def is_cut(client: socket.socket) -> bool:
    """Whether the server ends the connection without a word."""
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


def head(body: bytes, *, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length + body


@pytest.mark.parametrize(
    ("fields", "following"), [({"n": 2}, b""), ({"n": 2}, head(b"{}")), ({"stream": False}, b"")], ids=str
)
def test_a_client_that_leaves_frees_its_rows(
    small: Running, fields: dict[str, Any], following: bytes
) -> None:
    client = connection(small)
    client.sendall(head(json.dumps({**LONG, **fields}).encode()) + following)
    if "n" in fields:
        wait_for(client, b"data: ")
    else:
        assert comes_true(lambda: small.server.models["m"].engine.scheduler.rows.decoding == 1)
    client.close()
    assert comes_true(lambda: is_idle(small))
    request = json.loads(small.log.getvalue().splitlines()[-1])
    assert (request["status"], request["reason"]) == (499, "unfinished")


def test_a_client_that_reads_nothing_is_cut(small: Running) -> None:
    still = connection(small)
    still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    still.sendall(head(json.dumps(LONG).encode()))
    stalled = '"reason":"unfinished"'
    before = small.log.getvalue().count(stalled)
    others = small.post("/v1/completions", {"prompt": ["abc", "d"], "max_tokens": 20})
    assert others.status_code == 200

    def is_cut_in_time() -> bool:
        small.skip(PATIENCE)
        return small.log.getvalue().count(stalled) == before + 1

    assert comes_true(is_cut_in_time)
    assert comes_true(lambda: is_idle(small))
    still.close()


def test_a_crawling_head_and_an_idle_connection_are_cut(small: Running) -> None:
    silent, crawling = connection(small), connection(small)
    crawling.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
    for client in (silent, crawling):
        pass_time(small, client)
        assert is_cut(client)
        client.close()


def test_a_crawling_body_is_answered_and_cut(small: Running) -> None:
    client = connection(small)
    client.sendall(head(b'{"prompt"', length=100))
    pass_time(small, client)
    answer = b""
    while part := client.recv(1 << 16):
        answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"within 60 seconds" in answer
    client.close()


def test_an_idle_connection_serves_a_further_request(small: Running) -> None:
    with connection(small) as client:
        for pause in (0, LATE):
            small.skip(pause)
            client.sendall(head(b'{"prompt": "a", "max_tokens": 2}'))
            assert wait_for(client, b"}}").startswith(b"HTTP/1.1 200")


def test_requests_that_never_fit_are_refused_without_retry(small: Running) -> None:
    """Two rows and four waiting tasks."""
    assert comes_true(lambda: is_idle(small))
    body = {"prompt": "abc", "max_tokens": 2}
    answer = small.post("/v1/completions", {**body, "n": 6})
    assert len(answer.json()["choices"]) == 6
    assert small.post("/v1/completions", {**body, "prompt": ["a"] * 6}).status_code == 200
    for fields in ({"n": 7}, {"prompt": ["a"] * 7}):
        answer = small.post("/v1/completions", {**body, **fields})
        assert (answer.status_code, answer.headers.get("retry-after")) == (400, None)
        assert "at most 6" in answer.json()["error"]["message"]


def test_a_full_queue_answers_before_the_body_comes(small: Running) -> None:
    assert comes_true(lambda: is_idle(small))
    with small.server.models["m"].engine.places.take(6), connection(small) as late:
        late.sendall(head(b"", length=1 << 21))  # nothing of the body is sent
        answer = wait_for(late, b"}}")
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: " in answer.lower()
        assert b'"code":"queue_full"' in answer
        assert small.post("/v1/score", {"texts": ["a"]}).status_code == 429
        assert small.get("/health").status_code == 200
    assert comes_true(lambda: is_idle(small))


def test_requests_at_once_are_bounded(artefacts: dict[str, Path]) -> None:
    with running(sources(("m", artefacts["ring"])), limits=Limits(requests=2)) as server:
        with contextlib.ExitStack() as connections:
            for _ in range(2):
                connections.enter_context(connection(server)).sendall(head(b"{", length=999))
            assert comes_true(lambda: server.server.requests.total == 2)
            refused = server.get("/v1/models")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "too_many"
            assert server.get("/health").status_code == 200
        assert comes_true(lambda: server.server.requests.total == 0)


def test_bodies_at_once_are_bounded(artefacts: dict[str, Path]) -> None:
    limits = Limits(body_bytes=1000, bodies_bytes=1500)
    with running(sources(("m", artefacts["ring"])), limits=limits) as server:
        with connection(server) as slow:
            slow.sendall(head(b"{" + b" " * 898, length=1000))
            assert comes_true(lambda: server.server.bodies.total == 899)
            refused = server.post("/tokenize", b" " * 999)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many")
            assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
        assert comes_true(lambda: server.server.bodies.total == 0)


def test_connections_at_once_are_bounded(artefacts: dict[str, Path]) -> None:
    with running(sources(("m", artefacts["ring"])), limits=Limits(connections=2)) as server:

        def is_healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return server.get("/health").status_code == 200
            return False

        with connection(server), connection(server), connection(server) as third:
            assert is_cut(third)
        assert comes_true(is_healthy)


def test_a_body_that_is_too_large_is_refused_before_it_comes(small: Running) -> None:
    with connection(small) as client:
        client.sendall(head(b"", length=(1 << 22) + 1))
        assert wait_for(client, b"}}").startswith(b"HTTP/1.1 413")


def test_a_connection_outlives_a_refusal_that_came_before_the_body(small: Running) -> None:
    assert comes_true(lambda: is_idle(small))
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    with connection(small) as late:
        with small.server.models["m"].engine.places.take(6):
            late.sendall(head(b"", length=len(body)))
            assert wait_for(late, b"}}").startswith(b"HTTP/1.1 429")
        late.sendall(body)
        assert small.get("/health").status_code == 200  # the body has been read, too
        late.sendall(head(body))
        assert wait_for(late, b"}}").startswith(b"HTTP/1.1 200")
    assert comes_true(lambda: is_idle(small))


def test_the_head_of_the_next_request_cuts_no_answer(small: Running) -> None:
    """It may come in parts, and wait for the end of the answer."""
    assert comes_true(lambda: is_idle(small))
    body = head(json.dumps({**LONG, "max_tokens": 1500}).encode())
    with connection(small) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)  # far less than the answer
        client.sendall(body + body[:20])
        wait_for(client, b"data: ")
        small.skip(LATE)
        assert not is_idle(small)
        wait_for(client, b"[DONE]")
        client.sendall(body[20:])
        assert b"HTTP/1.1 200" in wait_for(client, b"data: ")
    assert comes_true(lambda: is_idle(small))


def test_the_rest_of_a_refused_body_may_not_crawl(small: Running) -> None:
    assert comes_true(lambda: is_idle(small))
    with small.server.models["m"].engine.places.take(6), connection(small) as crawling:
        crawling.sendall(head(b"", length=100))
        assert wait_for(crawling, b"}}").startswith(b"HTTP/1.1 429")
        for _ in range(2):
            crawling.sendall(b"{")
            small.skip(Limits().body_seconds / 3)
        pass_time(small, crawling)
        assert is_cut(crawling)
    assert comes_true(lambda: is_idle(small))


def act(server: Running, expected: dict[int, str], chance: random.Random, times: int) -> list[str]:
    """What a client does at random: it reads, leaves, sends a part, loses patience or reads nothing. Returns
    the answers that are not what they are for a client that is alone.
    """
    endless = head(json.dumps(LONG).encode())
    wrong = []
    for _ in range(times):
        kind = chance.randrange(5)
        if kind == 0:
            seed = chance.choice(list(expected))
            while (answer := server.post("/v1/completions", {**SHORT, "seed": seed})).status_code == 429:
                time.sleep(0.01)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected[seed]:
                wrong.append(answer.text)
            continue
        if kind == 1:
            with contextlib.suppress(httpx.TimeoutException):
                body = {**LONG, "stream": False}
                HTTP.post(server.at + "/v1/completions", json=body, timeout=chance.uniform(0.01, 0.2))
            continue
        with connection(server) as client:
            if kind == 2:
                client.sendall(endless[: chance.randrange(1, len(endless))])
                continue
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(endless)
            if kind == 3:
                client.recv(chance.randrange(1, 4000))
            else:
                time.sleep(chance.uniform(0, 0.3))
    return wrong


@pytest.mark.parametrize("times", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects_and_timeouts_change_no_other_answer(small: Running, times: int) -> None:
    assert comes_true(lambda: is_idle(small))
    expected = {
        seed: small.post("/v1/completions", {**SHORT, "seed": seed}).json()["choices"][0]["text"]
        for seed in range(4)
    }
    assert len(set(expected.values())) > 1
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(act, small, expected, random.Random(seed), times) for seed in range(8)]
        assert [wrong for client in clients for wrong in client.result()] == []
    assert comes_true(lambda: is_idle(small))
    assert small.server.models["m"].engine.scheduler.rows.free == 2
    for seed, text in expected.items():
        answer = small.post("/v1/completions", {**SHORT, "seed": seed})
        assert answer.json()["choices"][0]["text"] == text


def test_reading_in_bursts_gives_the_same_events(small: Running) -> None:
    body = {**LONG, "max_tokens": 600, "seed": 1, "n": 2, "stream_options": {"include_usage": True}}
    whole = small.post("/v1/completions", {**LONG, "max_tokens": 600, "seed": 1, "n": 2, "stream": False})
    client = connection(small)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # far less than the answer
    client.sendall(head(json.dumps(body).encode()))
    with http.client.HTTPResponse(client, method="POST") as response:
        response.begin()
        events = response.read(1000)
        while part := response.read(20_000):  # raises where a chunk is not well formed
            events += part
    client.close()
    *parts, usage, done = events.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    texts = ["", ""]
    for part in parts:
        (choice,) = json.loads(part.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole.json()["choices"]]
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 2 * 600


def test_an_answer_never_waits_for_an_acknowledgement() -> None:
    with Address(port=0).bind() as listener:  # connections have its options
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("binary", [True, False])
def test_a_refusal_is_never_written_into_a_binary_answer(binary: bool) -> None:
    sent: list[Message] = []
    cut: list[bool] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def answer() -> None:
        server: Any = SimpleNamespace()
        state = {CONNECTION: SimpleNamespace(cut=lambda: cut.append(True))}
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": state}
        request = RequestContext(server, scope, receive, send)
        if binary:
            await request.start([(b"content-type", b"application/octet-stream")])
        await request.events(b"begun")
        await request.refuse(RefusedError("the disk is full."))

    in_thread(answer())
    assert cut == [True] * binary
    assert (b"the disk is full" in sent[-1]["body"]) is not binary
