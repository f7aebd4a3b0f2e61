"""A whole segment with full memory, per token: what reading a prompt or scoring a text costs."""

from __future__ import annotations

from benchmarks.checked_sessions import Operators
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.steps import Progress, Row, measure_steps, table

__all__ = ["Row", "run", "table"]


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    operators: Operators = "standard",
    progress: Progress = lambda line: None,
) -> list[Row]:
    """One row, at the segment length of the configuration. None stands for its values."""
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.repeats)
    return measure_steps(
        config,
        config.mem_len if mem_len is None else mem_len,
        [(1, config.segment)],
        threads=threads,
        repeats=repeats,
        operators=operators,
        progress=progress,
    )
