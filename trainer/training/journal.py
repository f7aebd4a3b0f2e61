"""The record of a run: `metrics.jsonl`, and TensorBoard events with the same content on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtimes.base.errors import needs
from runtimes.base.files import atomic_file, read_bytes, writing
from trainer.run.checkpoint import METRICS

EVENTS = "tensorboard"  # folder in the run


class Journal:
    """Appends to the record of `run`.

    step: the step of the checkpoint from which training continues. Lines of later steps are removed.
    """

    def __init__(self, run: Path, *, step: int, tensorboard: bool) -> None:
        self.path = run / METRICS
        _trim(self.path, step)
        self.events = _summary_writer()(run / EVENTS, purge_step=step + 1) if tensorboard else None

    def write(self, step: int, **facts: Any) -> None:
        """Appends one line with these facts, which become events too."""
        with writing(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **facts}) + "\n")
        if self.events is not None:
            for name, value in facts.items():
                self.events.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the last events."""
        if self.events is not None:
            self.events.close()


def check_tensorboard(wanted: bool) -> None:
    """Raises MissingPackageError if TensorBoard is wanted and not installed."""
    if wanted:
        _summary_writer()


def _summary_writer() -> Any:
    with needs("tensorboard", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


def _trim(path: Path, step: int) -> None:
    """Removes the lines that were written after the checkpoint, and a line that a kill cut short."""
    kept = []
    for line in read_bytes(path).decode("utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    with atomic_file(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
