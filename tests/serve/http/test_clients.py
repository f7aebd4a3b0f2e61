"""Clients that leave, hang, crawl or come in crowds: none of them holds a row."""

from __future__ import annotations

import asyncio
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
from tests.serve.http.conftest import HTTP, SCOPE, Running, running, sources
from xl_export.serve.http.base.connection import Wire
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.exchange import LOOKS, SLOWEST, Exchange
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.serving import Address

LONG = {"prompt": "abc", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
LATE = Limits().header_seconds + 1  # longer than a head may take
PATIENCE = Limits().stalled_seconds
SHORT = {"prompt": "abcdefghijkl", "max_tokens": 30, "temperature": 1.0}


@pytest.fixture(scope="module")
def small(artefacts: dict[str, Path]) -> Iterator[Running]:
    """Two rows and four places in the queue."""
    limits = Limits(max_tokens=1_000_000, body_bytes=1 << 22)
    with running(sources(("m", artefacts["ring"]), rows=2, queue=4, unread=8), limits=limits) as server:
        # Connections inherit it. By default the kernel takes megabytes before it shows that a client reads
        # nothing.
        server.web.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
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


def test_a_request_whose_client_has_left_is_not_answered() -> None:
    connection: Any = SimpleNamespace(transport=None, flow=None, lost=True)
    cycle: Any = SimpleNamespace(disconnected=False)

    async def answer() -> None:
        with pytest.raises(ClientLeftError), Wire(connection, cycle).cancelled_when_lost():
            pytest.fail("it was begun")

    in_thread(answer())
    assert cycle.disconnected, "uvicorn would report a fault, and answer in our place"


def test_a_client_that_reads_nothing_pauses_itself_and_is_cut(small: Running) -> None:
    still = connection(small)
    still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    still.sendall(head(json.dumps(LONG).encode()))
    stalled = '"reason":"unfinished"'
    before = small.log.getvalue().count(stalled)
    others = small.post("/v1/completions", {"prompt": ["abc", "d"], "max_tokens": 20})
    assert others.status_code == 200
    assert comes_true(lambda: len(small.server.models["m"].engine.scheduler.paused) == 1)

    def is_cut_in_time() -> bool:
        small.skip(PATIENCE / LOOKS)
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


def test_a_body_that_is_too_large_is_refused_before_it_comes(small: Running) -> None:
    with connection(small) as client:
        client.sendall(head(b"", length=(1 << 22) + 1))
        assert wait_for(client, b"}}").startswith(b"HTTP/1.1 413")


def test_a_connection_outlives_a_refusal_that_came_before_the_body(small: Running) -> None:
    """The body that comes later is no head of another request that would come too slowly."""
    assert comes_true(lambda: is_idle(small))
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    with connection(small) as late:
        with small.server.models["m"].engine.places.take(6):
            late.sendall(head(b"", length=len(body)))
            assert wait_for(late, b"}}").startswith(b"HTTP/1.1 429")
        late.sendall(body)
        assert small.get("/health").status_code == 200  # the body has been read, too
        small.skip(LATE)
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
    """Its events are written at once, then they wait for it, and then they are written at once again."""
    body = {**LONG, "max_tokens": 600, "seed": 1, "n": 2, "stream_options": {"include_usage": True}}
    whole = small.post("/v1/completions", {**LONG, "max_tokens": 600, "seed": 1, "n": 2, "stream": False})
    client = connection(small)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # far less than the answer
    client.sendall(head(json.dumps(body).encode()))
    paused = False
    with http.client.HTTPResponse(client, method="POST") as response:
        response.begin()
        events = response.read(1000)
        while part := response.read(20_000):  # raises where a chunk is not well formed
            events += part
            paused = paused or comes_true(lambda: len(small.server.models["m"].engine.scheduler.paused) == 2)
    client.close()
    *parts, usage, done = events.removesuffix(b"\n\n").split(b"\n\n")
    assert paused
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


def answered(size: int, *, pause: float, count: int) -> tuple[bool, bool]:
    """Whether a client is cut off, and is noted as one that left, that takes messages of `size` bytes, each
    after `pause` seconds.
    """
    cut: list[bool] = []

    now = 0.0

    async def send(message: Message) -> None:
        nonlocal now
        now += pause
        for _ in range(2):  # in between, the event loop sees what time it is
            await asyncio.sleep(0)

    async def answer() -> bool:
        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        server: Any = SimpleNamespace(limits=Limits())
        exchange = Exchange(server, SCOPE, send, send)  # type: ignore[arg-type]

        def abort() -> None:
            cut.append(True)
            connection.lost = True
            connection.answering.cancel()

        connection: Any = SimpleNamespace(transport=SimpleNamespace(abort=abort), flow=None, lost=False)
        exchange.wire = Wire(connection, SimpleNamespace(disconnected=False, message_event=asyncio.Event()))  # type: ignore[arg-type]
        try:
            with exchange.while_connected():
                for _ in range(count):
                    await exchange.events(b"x" * size)
                await exchange.end()
        except ClientLeftError:
            return True
        return False

    left = in_thread(answer())
    return bool(cut), left


@pytest.mark.parametrize(
    ("size", "pause", "is_cut"),
    [
        (int(SLOWEST * PATIENCE / LOOKS / 4), PATIENCE / LOOKS / 2, True),  # takes half of what it must
        (
            int(SLOWEST * PATIENCE),
            PATIENCE / LOOKS / 2,
            False,
        ),  # takes eight times as much
    ],
)
def test_a_client_that_reads_too_slowly_is_disconnected(size: int, pause: float, is_cut: bool) -> None:
    assert answered(size, pause=pause, count=20 if is_cut else 12) == (is_cut, is_cut)


@pytest.mark.parametrize("binary", [True, False])
def test_a_refusal_is_never_written_into_a_binary_answer(binary: bool) -> None:
    sent: list[Message] = []
    cut: list[bool] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def answer() -> None:
        server: Any = SimpleNamespace()
        exchange = Exchange(server, SCOPE, send, send)  # type: ignore[arg-type]
        exchange.wire = SimpleNamespace(cut=lambda: cut.append(True))  # type: ignore[assignment]
        if binary:
            await exchange.start([(b"content-type", b"application/octet-stream")])
        await exchange.events(b"begun")
        await exchange.refuse(RefusedError("the disk is full."))

    in_thread(answer())
    assert cut == [True] * binary
    assert (b"the disk is full" in sent[-1]["body"]) is not binary
