"""A client for which the server waits: how much it must take not to be cut off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from tests.coroutines import in_thread
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.exchange import LOOKS, SLOWEST, Exchange
from xl_export.serve.http.base.limits import Limits

STALLED = 0.4  # seconds


def answered(size: int, *, pause: float, count: int) -> tuple[bool, bool]:
    """Whether a client is cut off, and is noted as one that left, that takes messages of `size` bytes, each
    after `pause` seconds.
    """
    cut: list[bool] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(pause)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer() -> bool:
        server: Any = SimpleNamespace(limits=Limits(stalled_seconds=STALLED))
        exchange = Exchange(server, {"path": "/", "headers": []}, receive, send)
        exchange.cut = lambda: cut.append(True)

        async def work() -> None:
            for _ in range(count):
                await exchange.events(b"x" * size)
            await exchange.end()

        try:
            await exchange.while_connected(work())
        except ClientLeftError:
            return True
        return False

    left = in_thread(answer())
    return bool(cut), left


@pytest.mark.parametrize(
    ("size", "pause", "is_cut"),
    [
        (int(SLOWEST * STALLED / LOOKS / 4), STALLED / LOOKS / 2, True),  # takes half of what it must
        (int(SLOWEST * STALLED), STALLED / LOOKS / 2, False),  # takes eight times as much, and is waited for
    ],
)
def test_a_client_that_reads_too_slowly_is_disconnected(size: int, pause: float, is_cut: bool) -> None:
    assert answered(size, pause=pause, count=20) == (is_cut, is_cut)


@pytest.mark.parametrize("binary", [True, False])
def test_a_refusal_is_never_written_into_a_binary_answer(binary: bool) -> None:
    sent: list[Message] = []
    cut: list[bool] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def answer() -> None:
        server: Any = SimpleNamespace()
        exchange = Exchange(server, {"path": "/", "headers": []}, send, send)  # type: ignore[arg-type]
        exchange.cut = lambda: cut.append(True)
        if binary:
            await exchange.start([(b"content-type", b"application/octet-stream")])
        await exchange.events(b"begun")
        await exchange.refuse(RefusedError("the disk is full."))

    in_thread(answer())
    assert cut == [True] * binary
    assert (b"the disk is full" in sent[-1]["body"]) is not binary
