"""What comes from an engine reaches its request once and in order, whether it is passed on or taken."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from xl_export.serve.core.task import Drawn, Ended, Task
from xl_export.serve.http.base.bridge import Bridge, Inbox
from xl_export.serve.http.base.metrics import Figures


class Engine:
    """Takes every task and notes what it is told. told: answers that were taken."""

    def __init__(self) -> None:
        self.told = 0

    def submit(self, task: Task, places: Any = None) -> None: ...
    def cancel(self, task: Task) -> None: ...

    def taken(self, task: Task, count: int) -> None:
        self.told += count


async def _answers(writable: list[bool], engine: Engine, figures: Figures) -> tuple[list[int], list[int]]:
    """Tokens that were passed on, and those that the request took, when two come in each turn of the loop."""
    bridge, task = Bridge(asyncio.get_running_loop(), unread=8), Task(tokens=np.arange(1))
    passed: list[int] = []
    taken: list[int] = []

    def way(drawn: Drawn) -> bool:
        if writable[drawn.token]:
            passed.append(drawn.token)
        return writable[drawn.token]

    async def request() -> None:
        with Inbox(bridge, engine, figures) as inbox:  # type: ignore[arg-type]
            inbox.submit(task)
            inbox.pass_on(task, way)
            while inbox.running:
                for _, answers in await inbox.get():
                    taken.extend(answer.token for answer in answers if isinstance(answer, Drawn))
                    passed.extend(-answer.token for answer in answers if isinstance(answer, Drawn))

    working = asyncio.ensure_future(request())
    for token in range(len(writable)):
        if token % 2 == 0:
            await asyncio.sleep(0.01)
        bridge.deliver([(task, [Drawn(token, "a")])])
    bridge.deliver([(task, [Ended(reason="length")])])
    await working
    assert not bridge.places
    return passed, taken


def test_tokens_keep_their_order_when_a_client_is_slow_for_a_moment() -> None:
    engine, figures = Engine(), Figures()
    writable = [True, True, False, True, True, True, True, False, True, True]
    order, taken = asyncio.run(_answers(writable, engine, figures))
    assert [abs(token) for token in order] == list(range(10))
    assert taken == [2, 3, 7]  # the third came in the same turn as the second, and after it
    assert figures.generated_tokens == 10
    assert engine.told == 10


def test_a_fault_in_passing_on_is_raised_where_the_request_waits() -> None:
    async def faulty() -> None:
        bridge, task = Bridge(asyncio.get_running_loop()), Task(tokens=np.arange(1))
        with Inbox(bridge, Engine(), Figures()) as inbox:  # type: ignore[arg-type]
            inbox.submit(task)
            inbox.pass_on(task, lambda drawn: bool(1 // 0))
            bridge.deliver([(task, [Drawn(1, "a")])])
            await inbox.get()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(faulty())
