"""How far long work is, said on standard error."""

from __future__ import annotations

import time

import click

FIRST, RARELY = 2.0, 60.0  # seconds until the first line, and between later ones at most


class Progress:
    """Call it with what is done of `total`, often: it prints a line after 2 seconds, 4, 8, 16, 32 and then every minute."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self._began, self._next = time.monotonic(), FIRST

    def __call__(self, done: int) -> None:
        taken = time.monotonic() - self._began
        if taken < self._next or not 0 < done < self.total:
            return
        while self._next <= taken:
            self._next += min(self._next, RARELY)
        left = taken * (self.total - done) / done
        click.echo(f"{self.what}: {done:,} of {self.total:,} {self.unit}, {left:,.0f} s left", err=True)
