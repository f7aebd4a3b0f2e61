"""A client for which the server waits: how much it must take not to be cut off."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.types import Message

from xl_export.serve.http.base.answering import LOOKS, SLOWEST, Answering, Channel

STALLED = 0.4  # seconds


def answered(size: int, *, pause: float, count: int) -> tuple[bool, bool]:
    """Whether a client is cut off, and is noted as one that left, that takes messages of `size` bytes, each
    after `pause` seconds.
    """
    cut: list[bool] = []
    state: dict[str, object] = {"abort": lambda: cut.append(True)}

    async def send(message: Message) -> None:
        await asyncio.sleep(pause)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work(channel: Channel) -> None:
        for _ in range(count):
            await channel.events(b"x" * size)
        await channel.end()

    async def answer() -> None:
        await Answering(work, stalled=STALLED)({"type": "http", "state": state}, receive, send)

    with ThreadPoolExecutor(1) as thread:  # another test may have left a loop running in this one
        thread.submit(lambda: asyncio.run(answer())).result()
    return bool(cut), bool(state.get("left"))


@pytest.mark.parametrize(
    ("size", "pause", "is_cut"),
    [
        (1, 30.0, True),  # takes nothing
        (int(SLOWEST * STALLED / LOOKS / 4), STALLED / LOOKS / 2, True),  # takes half of what it must
        (int(SLOWEST * STALLED), STALLED / LOOKS / 2, False),  # takes eight times as much, and is waited for
        (1, 0.0, False),  # takes little because there is no more
    ],
)
def test_a_client_is_cut_that_takes_next_to_nothing_while_it_is_waited_for(
    size: int, pause: float, is_cut: bool
) -> None:
    count = 40 if pause else 100
    assert answered(size, pause=pause, count=count) == (is_cut, is_cut)
