"""Who calls the iterations of an engine: a thread of its own, or an event loop between what else that does.

Waking a thread and passing Python's lock on costs about as much as a step of a small model. A step of a large
model would keep an event loop from everything else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an engine has to do.

    changed: held by whoever gives it something to do. there_is: whether there is something. turn: does one
    iteration, and gives whether it was the last. tell: delivers what the last iteration has said. end: called
    once after the last one, also where that has raised an error.
    """

    changed: threading.Condition
    there_is: Callable[[], bool]
    turn: Callable[[], bool]
    tell: Callable[[], None]
    end: Callable[[], None]


class Turns(Protocol):
    """in_loop: whether an event loop computes. alive: whether the last iteration is still to come."""

    in_loop: bool

    @property
    def alive(self) -> bool: ...
    def wake(self) -> None:
        """There is work; `changed` is held."""

    def join(self, within: float) -> None:
        """Waits for the end, at most so many seconds; not at all where that would wait for itself."""


class Unstarted:
    """Nobody: there are no iterations but the last one, which comes with `join`."""

    in_loop = alive = False

    def __init__(self, work: Work) -> None:
        self._work = work

    def wake(self) -> None:
        """Nobody is woken."""

    def join(self, within: float) -> None:
        """See `Turns`."""
        self._work.turn()
        self._work.end()


class OwnThread:
    """A thread, which sleeps while there is no work."""

    in_loop = False

    def __init__(self, work: Work) -> None:
        self._work, self._sleeping = work, False
        self._thread = threading.Thread(target=self._run, name="xl-export engine", daemon=True)

    def start(self) -> None:
        """Begins with what there is to do."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """See `Turns`."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """See `Turns`."""
        if self._sleeping:
            self._work.changed.notify()

    def join(self, within: float) -> None:
        """See `Turns`."""
        if threading.current_thread() is not self._thread:
            self._thread.join(within)

    def _run(self) -> None:
        work = self._work
        try:
            while True:
                if not work.there_is():
                    self._sleep()
                if work.turn():
                    return
        finally:
            work.end()

    def _sleep(self) -> None:
        work = self._work
        work.tell()
        with work.changed:
            while not work.there_is():
                self._sleeping = True
                work.changed.wait()
                self._sleeping = False


class InLoop:
    """An event loop: one iteration in each turn of it while there is work."""

    in_loop = True

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop, self._over = work, loop, threading.Event()
        self._placed = False  # whether the loop has an iteration among the next things to do

    def start(self) -> None:
        """Begins with what there is to do; any thread."""
        with self._work.changed:
            if self._work.there_is():
                self.wake()

    @property
    def alive(self) -> bool:
        """See `Turns`."""
        return not self._over.is_set()

    def wake(self) -> None:
        """See `Turns`."""
        if not self._placed:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for an answer
                self._loop.call_soon_threadsafe(self._iterate)
                self._placed = True

    def join(self, within: float) -> None:
        """See `Turns`."""
        if self._loop.is_closed() and self.alive:
            self._work.turn()
            self._finish()
        elif not self._runs_here():
            self._over.wait(within)

    def _runs_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs on this thread
            return False

    def _iterate(self) -> None:
        work, over = self._work, True
        try:
            last = work.turn()
            work.tell()  # at once: nobody else wants Python's lock for it
            over = last
        finally:  # also after an error, which the loop reports
            if over:
                self._finish()
        if over:
            return
        with work.changed:
            self._placed = work.there_is()
            if self._placed:
                self._loop.call_soon(self._iterate)

    def _finish(self) -> None:
        try:
            self._work.end()
        finally:
            self._over.set()
