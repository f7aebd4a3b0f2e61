"""The seconds and the peak memory of an export, which includes the comparison with PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import in_child
from benchmarks.configs import BenchmarkConfig, checked_threads
from benchmarks.measure import Limits, Timing
from benchmarks.models import random_weights, write_run
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import Form
from trainer.model.model import count_parameters

FORMS: tuple[Form, ...] = ("ring", "shift")  # not hidden, which the case memory-forms shows to be slow


@dataclass(frozen=True, kw_only=True)
class Row:
    """One form of memory, exported once. peak_bytes: of the process; None where the system does not tell."""

    form: Form
    mem_len: int
    export: Timing
    peak_bytes: int | None
    weight_bytes: int

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def run(
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each form, at the memory length of the configuration."""
    threads, rule = checked_threads(threads), MemoryRule(mem_len=config.mem_len, segment=config.segment)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        trained = write_run(Path(name) / "run", config.model, rule, random_weights(config.model))
        for form in FORMS:
            progress(f"{form}: exporting in a process of its own")
            report = in_child("export", trained, Path(name) / form, form, threads=threads)
            once = report["seconds"] * 1e3
            rows.append(
                Row(
                    form=form,
                    mem_len=rule.mem_len,
                    export=Timing(median=once, fastest=once, slowest=once, repeats=1),
                    peak_bytes=report["peak_bytes"],
                    weight_bytes=4 * count_parameters(config.model),
                )
            )
    return rows


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text; at least: reading the weights once from memory."""
    lines = ["form    seconds  at least  MB at most  MB of weights  times"]
    for row in rows:
        peak, times = "unknown", ""
        if row.peak_bytes is not None:
            peak, times = f"{row.peak_bytes / 1e6:.0f}", f"{row.peak_bytes / row.weight_bytes:.1f}"
        seconds, least = row.export.median / 1e3, limits.read_milliseconds(row.weight_bytes) / 1e3
        weights = f"{row.weight_bytes / 1e6:.0f}"
        line = f"{row.form:6}  {seconds:<7.3g}  {least:<8.2g}  {peak:10}  {weights:13}  {times}"
        lines.append(line.rstrip())
    return lines
