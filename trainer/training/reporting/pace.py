"""How fast training reads tokens, without the time that other work takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Tokens per second since the last report, without the time of validations and checkpoints.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Counts tokens that a step has read."""
        self._tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """The rate since the last report."""
        return self._tokens / max(self._clock() - self._since, 1e-9)

    def report(self) -> float:
        """Returns the rate since the last report, and begins to count anew."""
        rate = self.tokens_per_second
        self._since = self._clock()
        self._tokens = 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count."""
        began = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - began
