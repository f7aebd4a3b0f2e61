"""A build's progress on a terminal: one bar for each phase that TensorRT reports."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def make_monitor(trt: Any) -> Any:
    """An IProgressMonitor with nested bars that go when their phase is done; Ctrl-C ends the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.phases: list[str] = []  # all that were seen, in order
            self._bars: dict[str, tqdm[Any]] = {}
            self.stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases.append(phase_name)
            self._bars[phase_name] = tqdm(total=num_steps, desc=phase_name, leave=False, disable=None, position=len(self._bars))

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build."""
            try:
                self._bars[phase_name].update(max(0, step + 1 - self._bars[phase_name].n))
            except KeyboardInterrupt:  # an exception cannot pass through TensorRT
                self.stopped = True
            return not self.stopped

        def phase_finish(self, phase_name: str) -> None:
            self._bars.pop(phase_name).close()

    return Monitor()
