"""Coroutines in a thread: a browser under test keeps an event loop in the main one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Answered = TypeVar("Answered")


def in_thread(work: Coroutine[Any, Any, Answered]) -> Answered:
    """The result of a coroutine."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
