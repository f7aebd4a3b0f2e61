"""Long work off the event loop, which answers everybody: threads for texts, for the disk, and for steps.

None of them keeps the process from ending. A thread that computes in Python makes the event loop wait for
Python's lock, and several such threads make it wait several times as long. So long texts have one thread, and
short ones another, which never waits for a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from runtimes.base.machine import available_cpus

Result = TypeVar("Result")

INLINE = 1 << 10  # bytes, or as much work as a byte of text is; less is done on the event loop
SHORT = 1 << 14  # less is short work
TOKEN_WORK = 16  # how much more work a token with its log-probability is than a byte of text
BACKGROUND: set[asyncio.Task[Any]] = set()  # see `background`


class Threads:
    """Threads that run functions, in the order in which these came. They begin when they are needed."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._begun = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    async def run(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """The result of a function. Cancelling this coroutine drops a function that has not begun."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._jobs.put(partial(_settle, loop, future, partial(function, *arguments, **named)))
        if self._begun < self._most:
            self._begun += 1
            threading.Thread(target=self._work, name=f"xl-export {self._name}", daemon=True).start()
        return await future

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _settle(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Result], function: Callable[[], Result]
) -> None:
    """Runs a function on this thread, and gives its result or error to the future of an event loop."""
    if future.cancelled():  # the client has left
        return
    result: Any = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as raised:
        error = raised

    def settle() -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for it
        loop.call_soon_threadsafe(settle)


SHORT_WORK = Threads("short work", 1)
LONG_WORK = Threads("long work", 1)
# A slow disk holds up no work on texts, and long texts hold up no stream.
DISK = Threads("disk", min(32, available_cpus() + 4))
STEPS = Threads("steps", available_cpus())  # of models with named inputs


def background(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that runs to its end even if nothing awaits it; event loops hold only weak references."""
    task = asyncio.ensure_future(work)
    BACKGROUND.add(task)
    task.add_done_callback(BACKGROUND.discard)
    return task


async def on_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function that blocks, from a thread of its own."""
    return await Threads("blocking", 1).run(function, *arguments)


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """What a function of something of that size returns: at once if it is small, and otherwise from a
    thread.
    """
    if size < INLINE:
        return function(*arguments, **named)
    return await (SHORT_WORK if size < SHORT else LONG_WORK).run(function, *arguments, **named)


def size_of(tokens: int, likeliest: int | None) -> int:
    """How much work it is to write tokens into an answer, for `off_loop`.

    likeliest: how many of the likeliest tokens each has; None for tokens without log-probabilities.
    """
    return tokens if likeliest is None else TOKEN_WORK * tokens * (1 + likeliest)
