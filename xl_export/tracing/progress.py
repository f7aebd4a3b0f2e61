"""Which stage of a trace runs, and for how long: on a terminal a line that counts the seconds, in a log a
line for each stage that takes long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tqdm import tqdm

STAGES = ("comparing the module with itself", "tracing", "comparing the graph with the module")
TICK_SECONDS = 1.0
LOG_SECONDS = 5.0  # in a stage before a log names it
ADVICE_SECONDS = 60.0


def stage(name: str, *, advice: str | None = None) -> AbstractContextManager[Callable[[str], None]]:
    """Shows one of the `STAGES` while the block runs."""
    return shown(f"trace, stage {STAGES.index(name) + 1} of {len(STAGES)}: {name}", advice=advice)


@contextmanager
def shown(title: str, *, advice: str | None = None) -> Iterator[Callable[[str], None]]:
    """Shows what is done while the block runs.

    Yields a function that names the part that begins. advice: a sentence for what takes longer than a minute.
    """
    stream = sys.stderr  # the block may redirect it
    line = tqdm(desc=title, bar_format="{desc} ({elapsed})", leave=False, disable=None, file=stream)
    ended = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        lines = [(ADVICE_SECONDS, advice)] if advice else []
        if line.disable:  # not on a terminal
            lines.insert(0, (LOG_SECONDS, f"{title} …"))
        while not ended.wait(TICK_SECONDS):
            line.refresh()
            if lines and time.monotonic() - began > lines[0][0]:
                line.write(lines.pop(0)[1], file=stream)

    watching = threading.Thread(target=watch, daemon=True)
    with line:
        watching.start()
        try:
            yield lambda part: line.set_description_str(f"{title}: {part}")
        finally:
            ended.set()
            watching.join()
