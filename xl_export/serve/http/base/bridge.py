"""Between an engine's thread and the tasks of an event loop: at most one call a step of the engine.

An inbox receives the answers of the tasks that one request has submitted. The request waits for it once a
step for all of its tasks together, and takes all that is there. A drawn token that can be written to its
client without waiting goes there in the bridge's own call, because waking a task for each step and request
costs more than all the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from xl_export.serve.core.engine import Engine
from xl_export.serve.core.scheduler import QUEUED, Histogram
from xl_export.serve.core.task import Answer, Delivery, Ended, PromptFed, Task, TokenOut

Pass = Callable[[TokenOut], bool]
TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


class RequestMetrics:
    """What the requests to one model have cost, for `/metrics`."""

    def __init__(self) -> None:
        self.to_first = Histogram(TO_FIRST)
        self.between = Histogram(BETWEEN)
        self.whole = Histogram(WHOLE)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.ended: Counter[str] = Counter()
        #: Seconds in the queue.
        self.queued = Histogram(QUEUED)

    def note_tokens(self, gap: float, times: int) -> None:
        """So many drawn tokens arrived, each so many seconds after the one before it in its stream."""
        self.generated_tokens += times
        self.between.observe(gap, times)


class Bridge:
    """Gives what an engine delivers to the inboxes of one event loop.

    unread: as in the settings of the engine. What was accepted is reported to the engine in eighths of it.
    """

    def __init__(self, *, unread: int = 256) -> None:
        #: Of the requests; there with the first of them.
        self.loop: asyncio.AbstractEventLoop
        self.step = max(1, unread // 8)
        self.listeners: dict[Task, Listener] = {}

    def deliver(self, batch: Delivery) -> None:
        """Called on the engine's thread, at most once a step."""
        try:
            self.loop.call_soon_threadsafe(self._spread, batch)
        except RuntimeError:  # the loop is closed, so no task waits for an answer
            return

    def _spread(self, batch: Delivery) -> None:
        now = time.monotonic()
        inboxes: list[Inbox] = []
        for answered in batch:
            task, answers = answered
            listener = self.listeners.get(task)
            if listener is None:  # its client has left
                continue
            inbox = listener.inbox
            answer = answers[-1]
            passed = False
            if inbox.open and listener.pass_on and answer.__class__ is TokenOut and len(answers) == 1:
                try:
                    passed = listener.pass_on(answer)
                except Exception as error:  # it is the fault of the request
                    inbox.open = False
                    inbox.wake(error)
            if passed:
                inbox.metrics.note_tokens(now - listener.last, 1)
                listener.last = now
                listener.unacknowledged += 1
                if listener.unacknowledged >= self.step:
                    inbox.acknowledge(task, listener)
                continue
            inbox.note(listener, answers, now, draws=task.sampling is not None)
            if answer.__class__ is Ended:
                del self.listeners[task]
            if not inbox.arrived:
                inboxes.append(inbox)
            inbox.arrived.append(answered)
            inbox.open = False
        for inbox in inboxes:
            inbox.wake()


@dataclass(slots=True, eq=False)
class Listener:
    """Where the answers of one task go."""

    inbox: Inbox
    #: Writes a drawn token to the client at once. Returns False, and has changed nothing, if it would have to
    #: wait; None if there is no such way.
    pass_on: Pass | None = None
    #: Accepted answers that are not yet acknowledged to the engine.
    unacknowledged: int = 0
    #: When the last drawn token arrived.
    last: float = 0.0


class Inbox:
    """The answers of some tasks of one engine. Leaving its `with` block cancels those that have not ended."""

    def __init__(self, bridge: Bridge, engine: Engine, metrics: RequestMetrics) -> None:
        self._bridge = bridge
        bridge.loop = asyncio.get_running_loop()
        self._engine = engine
        #: To which its tokens and times are added.
        self.metrics = metrics
        self._began = time.monotonic()
        self._answers = False  # whether a token has been drawn or scored
        self._waiting: asyncio.Future[None] | None = None
        #: Whether the request waits and nothing has arrived, so that tokens may be passed on.
        self.open = False
        #: Answers that the request has not got yet.
        self.arrived: Delivery = []
        #: The tasks that have not ended.
        self.running: dict[Task, Listener] = {}

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.metrics.whole.observe(time.monotonic() - self._began)
        for task in self.running:
            self._engine.cancel(task)
            self._bridge.listeners.pop(task, None)

    def submit(self, task: Task) -> None:
        """Gives a task to the engine, and raises what `Engine.submit` raises."""
        self._bridge.listeners[task] = listener = Listener(self)
        try:
            self._engine.submit(task)
        except BaseException:
            del self._bridge.listeners[task]
            raise
        self.running[task] = listener

    def pass_on(self, task: Task, way: Pass) -> None:
        """From now on drawn tokens of this task are given to `way` while `get` waits; see `Listener`. Those
        that it takes are not given by `get`.
        """
        if listener := self.running.get(task):
            listener.pass_on = way

    def wake(self, error: Exception | None = None) -> None:
        """Called by the bridge when answers have arrived, or with an error that `get` raises."""
        if self._waiting is None or self._waiting.done():
            return
        if error is None:
            self._waiting.set_result(None)
        else:
            self._waiting.set_exception(error)

    def acknowledge(self, task: Task, listener: Listener) -> None:
        """Reports to the engine how many of a task's answers were accepted."""
        self._engine.taken(task, listener.unacknowledged)
        listener.unacknowledged = 0

    async def get(self) -> Delivery:
        """All answers that have arrived since the last call; waits for at least one.

        They count as taken, which is reported to the engine now and then. A caller that cannot pass them on
        does not call again, and the engine pauses the tasks of this inbox after `unread` more answers each.
        """
        if not self.arrived:
            self._waiting = asyncio.get_running_loop().create_future()
            self.open = True
            try:
                await self._waiting
            finally:
                self._waiting = None
                self.open = False
        arrived = self.arrived
        self.arrived = []
        for task, answers in arrived:
            listener = self.running[task]
            listener.unacknowledged += len(answers)
            if answers[-1].__class__ is Ended:
                del self.running[task]
            elif listener.unacknowledged >= self._bridge.step:
                self.acknowledge(task, listener)
        return arrived

    def note(self, listener: Listener, answers: list[Answer], now: float, *, draws: bool) -> None:
        """Called by the bridge when answers arrive that are not passed on: adds them to the metrics.

        So a client that takes them late does not make the server look slow. draws: whether the task draws
        tokens.
        """
        metrics = self.metrics
        drawn = 0
        for answer in answers:
            if isinstance(answer, TokenOut):
                drawn += 1
            elif isinstance(answer, PromptFed):
                metrics.prompt_tokens += answer.count
                metrics.cached_tokens += answer.cached
                if answer.log_probs is not None:
                    self._note_first(now)
            elif draws:
                metrics.ended[answer.reason] += 1
        if not drawn:
            return
        if listener.last:
            metrics.note_tokens((now - listener.last) / drawn, drawn)
        else:
            metrics.generated_tokens += drawn
            self._note_first(now)
        listener.last = now

    def _note_first(self, now: float) -> None:
        if not self._answers:
            self._answers = True
            self.metrics.to_first.observe(now - self._began)
