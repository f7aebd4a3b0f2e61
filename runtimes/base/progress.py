"""Prints on standard error how far long work has come, and what a caller should know once."""

from __future__ import annotations

import time

_said: set[str] = set()
FIRST_LINE_SECONDS = 2.0  # from the start
MAX_INTERVAL_SECONDS = 60.0  # between later lines


class Progress:
    """Prints lines of progress: call it often, with the number of units done.

    The lines come after 2, 4, 8, 16 and 32 seconds, and then every minute. Work of less than 2 seconds prints
    none.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self._began = time.monotonic()
        self._next = FIRST_LINE_SECONDS

    def __call__(self, done: int) -> None:
        taken = time.monotonic() - self._began
        if taken < self._next or not 0 < done < self.total:
            return
        while self._next <= taken:
            self._next += min(self._next, MAX_INTERVAL_SECONDS)
        left = taken * (self.total - done) / done
        _echo(f"{self.what}: {done:,} of {self.total:,} {self.unit}, {left:,.0f} s left")


def say_once(sentence: str) -> None:
    """Prints a sentence on standard error, unless this process has printed it before."""
    if sentence not in _said:
        _said.add(sentence)
        _echo(sentence)


def _echo(line: str) -> None:
    import click  # most programs print nothing, and importing it takes as long as opening a small model

    click.echo(line, err=True)
