"""A build's progress on a terminal, one bar for each phase that TensorRT reports, and Ctrl-C during a
build.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm


@contextmanager
def held_interrupt() -> Iterator[SimpleNamespace]:
    """Delays Ctrl-C until the end of the block, whose C++ code would swallow the exception.

    Yields an object with the field `asked`: whether Ctrl-C was pressed. If so, KeyboardInterrupt is raised at
    the end of the block. Python handles signals only in the main thread, so other threads just run the block.
    """
    held = SimpleNamespace(asked=False)
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, lambda *_: setattr(held, "asked", True))
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        if held.asked:
            raise KeyboardInterrupt


def make_monitor(trt: Any, held: SimpleNamespace) -> Any:
    """An IProgressMonitor that shows nested bars, each until its phase ends; it ends the build when Ctrl-C
    was pressed.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._bars: dict[str, tqdm[Any]] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._bars[phase_name] = tqdm(
                total=num_steps, desc=phase_name, leave=False, disable=None, position=len(self._bars)
            )

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False requests TensorRT to end the build."""
            self._bars[phase_name].update(max(0, step + 1 - self._bars[phase_name].n))
            return not held.asked

        def phase_finish(self, phase_name: str) -> None:
            self._bars.pop(phase_name).close()

    return Monitor()
