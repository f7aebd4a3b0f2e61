"""Prints on standard error what long work is doing, and what a caller should know once.

On a terminal that is a line that changes and disappears at the end; in a log, a line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_said: set[str] = set()
FIRST_LINE_SECONDS = 2.0  # from the start
MAX_INTERVAL_SECONDS = 60.0  # between later lines of a log
TICK_SECONDS = 1.0  # between changes of a terminal's line, by which seconds are counted
LOG_SECONDS = 5.0  # until a log names work whose end is not known
ADVICE_SECONDS = 60.0
BAR_SECONDS = 0.1  # between changes of a terminal's line, by which units are counted
BAR_COLUMNS = 30


class Progress:
    """Prints how much of some work is done: call it often, with the number of units done.

    A terminal gets a bar, which disappears at the end of a `with` block. A log gets lines after 2, 4, 8, 16
    and 32 seconds, and then every minute. Work of less than 2 seconds prints none.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self._began = time.monotonic()
        self._next = FIRST_LINE_SECONDS
        self._line = _Line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each is done when the next one is asked for."""
        for done, item in enumerate(items):
            self(done)
            yield item

    def __call__(self, done: int) -> None:
        taken = time.monotonic() - self._began
        if taken < self._next or not 0 < done < self.total:
            return
        left = taken * (self.total - done) / done
        counts = f"{done:,} of {self.total:,} {self.unit}, {left:,.0f} s left"
        if self._line.live:
            self._next = taken + BAR_SECONDS
            width = max(0, min(BAR_COLUMNS, columns() - len(f"{self.what}:  {counts}")))  # the counts fit
            full = width * done // self.total
            self._line.draw(f"{self.what}: {'█' * full}{'·' * (width - full)} {counts}")
            return
        while self._next <= taken:
            self._next += min(self._next, MAX_INTERVAL_SECONDS)
        _echo(f"{self.what}: {counts}")


@contextmanager
def working(title: str, *, advice: str | None = None, log: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows what is being done while the block runs, and for how many seconds.

    Yields a function that names the part that begins. advice: a sentence for what takes longer than a minute.
    log: whether a log names what takes long, too.
    """
    line, ended, part = _Line(), threading.Event(), [""]
    began = time.monotonic()
    lines = [(ADVICE_SECONDS, advice)] if advice else []
    if log and not line.live:
        lines.insert(0, (LOG_SECONDS, f"{title} …"))

    def draw() -> None:
        line.draw(f"{title}{part[0]} ({time.monotonic() - began:.0f} s)")

    def watch() -> None:
        while not ended.wait(TICK_SECONDS):
            if lines and time.monotonic() - began > lines[0][0]:
                line.print(lines.pop(0)[1])
            draw()

    def begin(name: str) -> None:
        part[0] = f": {name}"
        draw()

    watching = threading.Thread(target=watch, daemon=True)
    draw()
    watching.start()
    try:
        yield begin
    finally:
        ended.set()
        watching.join()
        line.close()


class _Line:
    """The last line of a terminal. Of several that are open, only the newest is drawn."""

    _open: list[_Line] = []  # noqa: RUF012, shared by all
    _drawing = threading.Lock()

    def __init__(self) -> None:
        self.stream = sys.stderr  # the work may redirect it
        self.live = self.stream.isatty()
        self._shown = 0
        self._open.append(self)

    def draw(self, text: str) -> None:
        with self._drawing:
            if self.live and self._open and self._open[-1] is self:
                # Blanks replace the rest of the last text: commands print no control characters but \r. The
                # cursor returns to the first column, so that what others print replaces the line.
                text = text[: columns()]
                self.stream.write(f"{text:<{self._shown}}\r")
                self.stream.flush()
                self._shown = len(text)

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        self.draw("")
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        self.draw("")
        with self._drawing:
            if self in self._open:
                self._open.remove(self)


def columns() -> int:
    """How long a text may be on the last line of a terminal."""
    import shutil  # takes milliseconds, which only a terminal has to pay

    return shutil.get_terminal_size().columns - 1


def say_once(sentence: str) -> None:
    """Prints a sentence on standard error, unless this process has printed it before."""
    if sentence not in _said:
        _said.add(sentence)
        _echo(sentence)


def _echo(line: str) -> None:
    import click  # most programs print nothing, and importing it takes as long as opening a small model

    click.echo(line, err=True)
