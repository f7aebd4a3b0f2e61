"""Between an engine's thread and the tasks of an event loop: one call a step of the engine.

An inbox receives the answers of the tasks that one request has submitted. The request waits for it once a
step, whatever the number of its tasks, and takes all that is there. What it can pass on without waiting it
takes in the bridge's own call, because waking a task for each step and request costs more than the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from xl_export.serve.core.task import Answer, Drawn, Ended, Fed, Task
from xl_export.serve.core.waiting import Busy, Places
from xl_export.serve.http.base.errors import busy
from xl_export.serve.http.base.metrics import Figures

Delivery = list[tuple[Task, list[Answer]]]
AtOnce = Callable[[Delivery], bool]


class Accepts(Protocol):
    """What an inbox needs of an engine; see `xl_export.serve.core.engine.Engine`."""

    def reserve(self, count: int, *, tenant: str = "", bulk: bool = False) -> Places: ...
    def refuse_more(self, count: int = 1, *, tenant: str = "", bulk: bool = False) -> None: ...
    def submit(self, task: Task, places: Places | None = None) -> None: ...
    def cancel(self, task: Task) -> None: ...
    def taken(self, task: Task, count: int) -> None: ...


class Bridge:
    """Gives what an engine delivers to the inboxes of one event loop.

    unread: as in the settings of the engine. What was taken is told to the engine in eighths of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, unread: int = 256) -> None:
        self._loop, self.step = loop, max(1, unread // 8)
        self.places: dict[Task, Inbox] = {}
        self.now = 0.0  # when the last answers arrived

    def deliver(self, batch: Delivery) -> None:
        """Called on the engine's thread, once a step."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for an answer
            self._loop.call_soon_threadsafe(self._spread, batch)

    def _spread(self, batch: Delivery) -> None:
        self.now = time.monotonic()
        places, inboxes = self.places, []
        for answered in batch:
            task, answers = answered
            inbox = places.get(task)
            if inbox is None:  # its client has left
                continue
            if answers[-1].__class__ is Ended:
                del places[task]
            if not inbox.arrived:
                inboxes.append(inbox)
            inbox.arrived.append(answered)
        for inbox in inboxes:
            inbox.look()


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turns an engine's refusal of a task for which it has no place now into that of the request."""
    try:
        yield
    except Busy as error:
        raise busy(error.retry_after) from error


class Inbox:
    """The answers of some tasks of one engine. Leaving its `with` block cancels those that have not ended.

    arrived: answers that nobody has taken. running: the tasks that have not ended, with how many of their
    answers were taken and not yet told to the engine. figures: to which its tokens and times are added.
    """

    def __init__(self, bridge: Bridge, engine: Accepts, figures: Figures) -> None:
        self._bridge, self._engine, self._figures = bridge, engine, figures
        self._began = time.monotonic()
        self._last = 0.0  # when the last drawn tokens arrived
        self._answers = False  # whether a token has been drawn or scored
        self._waiting: asyncio.Future[None] | None = None
        self._at_once: AtOnce | None = None
        self._places: Places | None = None
        self.arrived: Delivery = []
        self.running: dict[Task, int] = {}

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._figures.whole.observe(time.monotonic() - self._began)
        if self._places is not None:
            self._places.release()
        for task in self.running:
            self._engine.cancel(task)
            self._bridge.places.pop(task, None)

    def reserve(self, count: int, tenant: str) -> None:
        """Takes places for all tasks that this request will submit, so that none of them is refused later;
        raises RefusedError where the queue has not so many now, UserError where it never has.
        """
        with refusing():
            self._places = self._engine.reserve(count, tenant=tenant)

    def submit(self, task: Task) -> None:
        """Gives a task to the engine; raises RefusedError where its queue is full and no place was reserved,
        UserError where the task cannot be done.
        """
        self._bridge.places[task] = self
        try:
            with refusing():
                self._engine.submit(task, self._places)
        except BaseException:
            del self._bridge.places[task]
            raise
        self.running[task] = 0

    def look(self) -> None:
        """Called by the bridge when answers have arrived."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        if self._at_once is not None:
            try:
                if self._at_once(self.arrived):
                    self._note(self.arrived)
                    self.arrived.clear()
                    return
            except Exception as error:  # it is the fault of the request, which waits for the future
                waiting.set_exception(error)
                return
        waiting.set_result(None)

    async def get(self, at_once: AtOnce | None = None) -> Delivery:
        """All answers that have arrived since the last call; waits for at least one.

        They count as taken. So whoever cannot pass them on does not call again, and the engine pauses the
        tasks of this inbox after `unread` more answers each. at_once: is given answers as soon as they arrive
        while this call waits; where it returns True it has taken them, and the call goes on waiting. Where it
        returns False it has changed nothing.
        """
        if not self.arrived:
            self._waiting, self._at_once = asyncio.get_running_loop().create_future(), at_once
            try:
                await self._waiting
            finally:
                self._waiting = self._at_once = None
        arrived, self.arrived = self.arrived, []
        self._note(arrived)
        return arrived

    def _note(self, arrived: Delivery) -> None:
        """Adds to the figures, and tells the engine now and then how much was taken."""
        running, step, drawn = self.running, self._bridge.step, 0
        for task, answers in arrived:
            if len(answers) == 1 and answers[0].__class__ is Drawn:  # the usual way
                drawn += 1
            else:
                drawn += self._count(task, answers)
            if answers[-1].__class__ is Ended:
                running.pop(task, None)
            elif (count := running[task] + len(answers)) >= step:
                self._engine.taken(task, count)
                running[task] = 0
            else:
                running[task] = count
        if not drawn:
            return
        figures, now = self._figures, self._bridge.now
        figures.generated_tokens += drawn
        if self._last:
            figures.between.observe((now - self._last) / drawn, drawn)
        elif not self._answers:
            self._answers = True
            figures.to_first.observe(now - self._began)
        self._last = now

    def _count(self, task: Task, answers: list[Answer]) -> int:
        """Adds answers to the figures; how many of them are drawn tokens."""
        figures, drawn = self._figures, 0
        for answer in answers:
            if isinstance(answer, Drawn):
                drawn += 1
            elif isinstance(answer, Fed):
                figures.prompt_tokens += answer.count
                figures.cached_tokens += answer.cached
                if answer.log_probs is not None and not self._answers:
                    self._answers = True
                    figures.to_first.observe(self._bridge.now - self._began)
            elif task.drawing is not None:
                figures.ended[answer.reason] += 1
        return drawn
