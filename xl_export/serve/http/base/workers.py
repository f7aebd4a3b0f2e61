"""Long work off the event loop, which answers everybody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from runtimes.base.machine import available_cpus

Result = TypeVar("Result")

INLINE = 1 << 14  # bytes, or as much work as a byte of text is; less is done on the event loop
TOKEN_WORK = 16  # how much more work a token with its log-probability is than a byte of text
# A slow disk must not hold up work on texts.
DISK = ThreadPoolExecutor(min(32, available_cpus() + 4), thread_name_prefix="xl-export disk")
BACKGROUND: set[asyncio.Task[Any]] = set()  # see `background`


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
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = function(*arguments), None
        except BaseException as error:
            outcome = None, error
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="xl-export blocking", daemon=True).start()
    return await future


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """What a function of something of that size returns: at once if it is small, and otherwise from a
    thread.
    """
    if size < INLINE:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


async def on_disk(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """The result of a function that uses the disk."""
    return await asyncio.get_running_loop().run_in_executor(DISK, partial(function, *arguments, **named))


def size_of(tokens: int, likeliest: int | None) -> int:
    """How much work it is to write tokens into an answer, for `off_loop`.

    likeliest: how many of the likeliest tokens each has; None for tokens without log-probabilities.
    """
    return tokens if likeliest is None else TOKEN_WORK * tokens * (1 + likeliest)
