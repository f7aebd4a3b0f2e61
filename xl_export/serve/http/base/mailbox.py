"""From an engine's thread to the requests of an event loop: the only way in which requests run tasks.

The engine delivers new answers of all tasks together, at most once a step. One call on the event loop sorts a
delivery into the mailboxes of the requests, and wakes each request once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator

from xl_export.serve.core.engine import Engine
from xl_export.serve.core.scheduler import QUEUED, Histogram
from xl_export.serve.core.task import Answer, Delivery, Ended, PromptFed, Task, TokenOut

TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


class RequestMetrics:
    """Counts and times of the requests to one model, for `/metrics`."""

    def __init__(self) -> None:
        self.to_first = Histogram(TO_FIRST)
        """Seconds from each request to its first token."""
        self.between = Histogram(BETWEEN)
        """Seconds between the tokens of a stream."""
        self.whole = Histogram(WHOLE)
        """Seconds of each request."""
        self.queued = Histogram(QUEUED)
        """Seconds in the queue."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.ended: Counter[str] = Counter()
        """Number of tasks that drew tokens, by the reason of their end."""


class Mailboxes:
    """The mailboxes of one engine, whose `deliver` the engine calls."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._of: dict[Task, Mailbox] = {}

    def open(self, engine: Engine, metrics: RequestMetrics) -> Mailbox:
        """A mailbox for one request; use it in a `with` block, on the event loop of all requests."""
        self._loop = asyncio.get_running_loop()
        return Mailbox(engine, self._of, metrics)

    def deliver(self, delivery: Delivery) -> None:
        """Called on the engine's thread."""
        assert self._loop is not None, "tasks are submitted from mailboxes"
        try:
            self._loop.call_soon_threadsafe(self._sort, delivery)
        except RuntimeError:  # the loop is closed, so no request waits for an answer
            return

    def _sort(self, delivery: Delivery) -> None:
        now = time.monotonic()
        for task, answers in delivery:
            if mailbox := self._of.get(task):  # otherwise its client has left
                mailbox.put(task, answers, now)

    @property
    def tasks(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._of)


class Mailbox(AsyncIterator[tuple[Task, Answer]]):
    """The answers to the tasks that one request submits:

        with model.mailbox() as mailbox:
            mailbox.submit(task)
            async for task, answer in mailbox:
                ...

    The iteration ends with the last answer of the last task. Leaving the block cancels tasks that have not
    ended. The engine ends a task with too many answers that were not taken (`EngineSettings.unread`), so a
    request that waits for its client holds few answers.
    """

    def __init__(self, engine: Engine, boxes: dict[Task, Mailbox], metrics: RequestMetrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._boxes = boxes
        self._metrics = metrics
        self._began = time.monotonic()
        self._has_first = False  # whether a token was drawn or scored
        self._arrived: deque[tuple[Task, Answer]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._running: dict[Task, float] = {}  # when the last drawn token of each task arrived; 0 before it

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.whole.observe(time.monotonic() - self._began)
        for task in self._running:
            self._engine.cancel(task)
            self._boxes.pop(task, None)

    def submit(self, task: Task) -> None:
        """Gives a task to the engine, and raises what `Engine.submit` raises."""
        self._engine.submit(task)
        self._boxes[task] = self  # in time: its answers are sorted on this thread
        self._running[task] = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether all answers that have arrived were taken."""
        return not self._arrived

    @property
    def running(self) -> int:
        """Number of tasks whose last answer was not taken."""
        return len(self._running)

    async def __anext__(self) -> tuple[Task, Answer]:
        if not self._arrived:
            if not self._running:
                raise StopAsyncIteration
            self._waiting = self._loop.create_future()
            await self._waiting
        task, answer = self._arrived.popleft()
        if isinstance(answer, Ended):
            del self._running[task]
        else:
            self._engine.taken(task, 1)
        return task, answer

    def put(self, task: Task, answers: list[Answer], now: float) -> None:
        """Adds answers of a task, and wakes the request. They are counted now, so that a client that reads
        slowly does not make the server look slow.
        """
        drawn = 0
        for answer in answers:
            self._arrived.append((task, answer))
            if isinstance(answer, TokenOut):
                drawn += 1
            else:
                self._note(task, answer, now)
        if drawn:
            metrics = self._metrics
            metrics.generated_tokens += drawn
            if last := self._running[task]:
                metrics.between.observe((now - last) / drawn, drawn)
            else:
                self._note_first(now)
            self._running[task] = now
        if self._waiting is not None:
            if not self._waiting.done():  # its request may have been cancelled
                self._waiting.set_result(None)
            self._waiting = None

    def _note(self, task: Task, answer: PromptFed | Ended, now: float) -> None:
        metrics = self._metrics
        if isinstance(answer, Ended):
            del self._boxes[task]
            if task.sampling is not None:
                metrics.ended[answer.reason] += 1
            return
        metrics.prompt_tokens += answer.count
        metrics.cached_tokens += answer.cached
        if answer.log_probs is not None:
            self._note_first(now)

    def _note_first(self, now: float) -> None:
        if not self._has_first:
            self._has_first = True
            self._metrics.to_first.observe(now - self._began)
