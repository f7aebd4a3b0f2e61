"""Work on texts off the event loop, which answers all clients.

A thread that computes in Python makes the event loop wait for the GIL, and several such threads make it wait
several times as long. So there is one thread for long texts, and one for short texts, which never wait for a
long one. What blocks without computing, such as the disk, uses `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

INLINE_BYTES = 1 << 12  # less is done on the event loop: 2.5 ms for a text of parts of words
LONG_BYTES = 1 << 16  # 40 ms
BYTES_OF_TOKEN = 8  # writing a token into an answer takes as long as reading this much text
SHORT_WORK = ThreadPoolExecutor(1, "xl-export short work")
LONG_WORK = ThreadPoolExecutor(1, "xl-export long work")
BACKGROUND: set[asyncio.Task[Any]] = set()  # see `background`


def background(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that runs to its end even if nothing awaits it; event loops hold only weak references."""
    task = asyncio.ensure_future(work)
    BACKGROUND.add(task)
    task.add_done_callback(BACKGROUND.discard)
    # asyncio logs an error that nothing has asked for.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """The result of a function: at once if its work is small, and otherwise from a thread.

    size: bytes of text that take about as long. Cancelling this coroutine drops work that has not begun.
    """
    if size < INLINE_BYTES:
        return function(*arguments, **named)
    thread = SHORT_WORK if size < LONG_BYTES else LONG_WORK
    return await asyncio.get_running_loop().run_in_executor(thread, partial(function, *arguments, **named))


def size_of_tokens(count: int, likeliest: int | None = None) -> int:
    """The work of writing tokens into an answer, for `off_loop`.

    likeliest: the number of alternatives of each token.
    """
    return BYTES_OF_TOKEN * count * (1 + (likeliest or 0))
