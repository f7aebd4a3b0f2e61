"""Between an engine's thread and the tasks of an event loop: one call a step of the engine.

An inbox receives the answers of the tasks that one request has submitted. The request waits for it once a
step, whatever the number of its tasks, and takes all that is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from xl_export.serve.core.task import Answer, Ended, Task
from xl_export.serve.http.errors import busy

OnEnd = Callable[[Ended], None]
Delivery = list[tuple[Task, list[Answer]]]


class Accepts(Protocol):
    """What an inbox needs of an engine; see `xl_export.serve.core.engine.Engine`."""

    def submit(self, task: Task) -> None: ...
    def cancel(self, task: Task) -> None: ...
    def taken(self, task: Task, count: int) -> None: ...


class Bridge:
    """Gives what an engine delivers to the inboxes of one event loop.

    unread: as in the settings of the engine. What was taken is told to the engine in eighths of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, unread: int = 256) -> None:
        self._loop, self.step = loop, max(1, unread // 8)
        self.places: dict[Task, tuple[Inbox, OnEnd | None]] = {}
        self.now = 0.0  # when the last answers arrived

    def deliver(self, batch: Delivery) -> None:
        """Called on the engine's thread, once a step."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for an answer
            self._loop.call_soon_threadsafe(self._spread, batch)

    def _spread(self, batch: Delivery) -> None:
        self.now = time.monotonic()
        for task, answers in batch:
            place = self.places.get(task)
            if place is None:  # its client has left
                continue
            inbox, on_end = place
            if type(answers[-1]) is Ended:
                del self.places[task]
                if on_end is not None:
                    on_end(answers[-1])
            inbox.put(task, answers)


class Inbox:
    """The answers of some tasks of one engine. Leaving its `with` block cancels those that have not ended.

    running: the tasks that have not ended, with how many of their answers were taken and not yet told to the
    engine.
    """

    def __init__(self, bridge: Bridge, engine: Accepts) -> None:
        self._bridge, self._engine = bridge, engine
        self._arrived: Delivery = []
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self.running: dict[Task, int] = {}

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for task in self.running:
            self._engine.cancel(task)
            if (place := self._bridge.places.get(task)) and place[1] is None:
                del self._bridge.places[task]

    def submit(self, task: Task, on_end: OnEnd | None = None) -> None:
        """Gives a task to the engine; raises RefusedError where its queue is full, UserError where the task
        cannot be done.

        on_end: called in the event loop with the task's `Ended`, although the inbox may be closed by then.
        """
        self._bridge.places[task] = self, on_end
        try:
            self._engine.submit(task)
        except BaseException as error:
            del self._bridge.places[task]
            if (retry_after := getattr(error, "retry_after", None)) is not None:
                raise busy(retry_after) from error
            raise
        self.running[task] = 0

    def put(self, task: Task, answers: list[Answer]) -> None:
        """Called by the bridge."""
        if self._closed:
            return
        self._arrived.append((task, answers))
        if self._waiting is not None:
            if not self._waiting.done():
                self._waiting.set_result(None)
            self._waiting = None

    async def get(self) -> Delivery:
        """All answers that have arrived since the last call; waits for at least one.

        They count as taken. So whoever cannot pass them on does not call again, and the engine pauses the
        tasks of this inbox after `unread` more answers each.
        """
        if not self._arrived:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        arrived, self._arrived = self._arrived, []
        running, step = self.running, self._bridge.step
        for task, answers in arrived:
            if type(answers[-1]) is Ended:
                running.pop(task, None)
            elif (count := running[task] + len(answers)) >= step:
                self._engine.taken(task, count)
                running[task] = 0
            else:
                running[task] = count
        return arrived


async def answers(
    bridge: Bridge, engine: Accepts, task: Task, on_end: OnEnd | None = None
) -> AsyncIterator[list[Answer]]:
    """Submits a task and yields its answers; leaving the loop early (`aclosing`) cancels it."""
    with Inbox(bridge, engine) as inbox:
        inbox.submit(task, on_end)
        while inbox.running:
            for _, got in await inbox.get():
                yield got
