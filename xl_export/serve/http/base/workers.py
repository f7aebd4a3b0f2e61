"""Work of more than a millisecond that is not the engine's: threads that do it, tenants in turn.

The event loop answers everybody, so nothing long may run there. Three groups of threads do it instead: short
work, long work, and the disk. So a short request never waits behind a long one. Long work has one thread,
because a thread that computes in Python makes the event loop wait up to five milliseconds for Python's lock,
and several such threads make it wait several times as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from runtimes.base.machine import available_cpus

Result = TypeVar("Result")
# A function that may take long is written as a generator: it yields wherever others may have their turn.
Steps: TypeAlias = Generator[None, None, Result]

INLINE = 1 << 10  # bytes, or as much work as a byte of text is; less is done on the event loop
SHORT = 1 << 14  # less is short work
TOKEN_WORK = 16  # how much more work a token with its log-probability is than a byte of text
TURN = 0.005  # seconds after which it is the next job's turn
BACKGROUND: set[asyncio.Task[Any]] = set()  # see `background`


@dataclass(eq=False)
class _Job:
    """A function that is run in steps, and what waits for its result."""

    tenant: str
    steps: Steps[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def has_ended(self) -> bool:
        """Does the job for one turn; whether it has ended, and its result or error is on its way."""
        end = time.monotonic() + TURN
        try:
            if self.future.cancelled():  # the client has left
                self.steps.close()
                return True
            next(self.steps)
            while time.monotonic() < end:
                next(self.steps)
            return False
        except StopIteration as stop:
            self._settle(stop.value, None)
        except BaseException as error:
            self._settle(None, error)
            del self  # the error's frames would hold the job, and the job's future the error
        return True

    def _settle(self, result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if self.future.cancelled():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for it
            self.loop.call_soon_threadsafe(settle)


class Workers:
    """Threads that run functions, each tenant's in turn.

    threads: begin when they are needed, and do not keep the process from ending. A tenant with a name has at
    most half of them at once.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._share = max(1, threads // 2)
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._begun = self._idle = 0
        self._changed = threading.Condition()

    async def run(self, tenant: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function or, if it is a generator, what it returns at its end. Cancelling this
        coroutine drops the job before its next turn.
        """
        # No variable holds the future: an error in it would hold this frame, and the frame the future.
        return await self._submitted(tenant, _steps_of(function, arguments, named))

    def _submitted(self, tenant: str, steps: Steps[Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        job = _Job(tenant, steps, loop, loop.create_future())
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(job)
            if self._begun < self._threads and self._idle < sum(map(len, self._waiting.values())):
                self._begun += 1
                threading.Thread(target=self._work, name=f"xl-export {self._name}", daemon=True).start()
            self._changed.notify()
        return job.future

    def _work(self) -> None:
        while True:
            job = self._next()
            has_ended = job.has_ended()
            with self._changed:
                self._running[job.tenant] -= 1
                if not self._running[job.tenant]:
                    del self._running[job.tenant]
                if not has_ended:
                    self._waiting.setdefault(job.tenant, deque()).append(job)
                self._changed.notify()  # the tenant may have another one running now
            del job  # and with it its result, until there is another one

    def _next(self) -> _Job:
        with self._changed:
            self._idle += 1
            while (tenant := self._turn()) is None:
                self._changed.wait()
            self._idle -= 1
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind all others
            self._running[tenant] += 1
            return job

    def _turn(self) -> str | None:
        """The tenant whose turn it is; None if nothing waits that may run now."""
        may_run = (name for name in self._waiting if not name or self._running[name] < self._share)
        return next(may_run, None)


def _steps_of(function: Callable[..., Any], arguments: Any, named: Any) -> Steps[Any]:
    result = function(*arguments, **named)
    return (yield from result) if isinstance(result, Generator) else result


def background(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that runs to its end even if nothing awaits it; event loops hold only weak references."""
    task = asyncio.ensure_future(work)
    BACKGROUND.add(task)
    task.add_done_callback(BACKGROUND.discard)
    return task


async def on_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function that blocks, from a thread of its own, which does not keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    job = _Job("", _steps_of(function, arguments, {}), loop, loop.create_future())
    threading.Thread(target=job.has_ended, name="xl-export blocking", daemon=True).start()
    result: Result = await job.future
    return result


SHORT_WORK = Workers("short work")
LONG_WORK = Workers("long work")
# For the disk of the stores: a slow one holds up no work on texts, and long texts hold up no stream.
DISK = Workers("disk", min(32, available_cpus() + 4))


async def aside(
    size: int, tenant: str, function: Callable[..., Steps[Result]], *arguments: Any, **named: Any
) -> Result:
    """What a function of something of that size returns: at once if it is small, and otherwise from a
    thread, so that no other client waits for it. tenant: whose work it is.
    """
    if size < INLINE:
        return finished(function(*arguments, **named))
    workers = SHORT_WORK if size < SHORT else LONG_WORK
    result: Result = await workers.run(tenant, function, *arguments, **named)
    return result


def size_of(tokens: int, likeliest: int | None) -> int:
    """How much work it is to write tokens into an answer, for `aside`.

    likeliest: how many of the likeliest tokens each has; None for tokens without log-probabilities.
    """
    return tokens if likeliest is None else TOKEN_WORK * tokens * (1 + likeliest)


def finished(steps: Steps[Result]) -> Result:
    """What a generator returns at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
