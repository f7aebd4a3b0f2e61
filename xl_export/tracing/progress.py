"""Which stage of a trace runs, and for how long: on a terminal a line that counts the seconds, in a log a
line for each stage that takes long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

STAGES = ("comparing the module with itself", "tracing", "comparing the graph with the module")
TICK_SECONDS = 1.0
LOG_SECONDS = 5.0  # in a stage before a log names it
ADVICE_SECONDS = 60.0


@contextmanager
def stage(name: str, *, advice: str | None = None) -> Iterator[Callable[[str], None]]:
    """Shows one of the `STAGES` while the block runs.

    Yields a function that names the part of the stage that begins. advice: a sentence for a stage that takes
    longer than a minute.
    """
    title = f"trace, stage {STAGES.index(name) + 1} of {len(STAGES)}: {name}"
    stream = sys.stderr  # the block may redirect it
    shown = tqdm(desc=title, bar_format="{desc} ({elapsed})", leave=False, disable=None, file=stream)
    ended = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        lines = [(ADVICE_SECONDS, advice)] if advice else []
        if shown.disable:  # not on a terminal
            lines.insert(0, (LOG_SECONDS, f"{title} …"))
        while not ended.wait(TICK_SECONDS):
            shown.refresh()
            if lines and time.monotonic() - began > lines[0][0]:
                shown.write(lines.pop(0)[1], file=stream)

    watching = threading.Thread(target=watch, daemon=True)
    with shown:
        watching.start()
        try:
            yield lambda part: shown.set_description_str(f"{title}: {part}")
        finally:
            ended.set()
            watching.join()
