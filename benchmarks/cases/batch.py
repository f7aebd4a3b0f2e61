"""One token of each of several independent streams with full memory: what a common step saves."""

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
    """A row for each number of streams. An argument that is None is taken from the configuration."""
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.repeats)
    steps = [(batch, 1) for batch in config.streams]
    return measure_steps(
        config,
        config.mem_len if mem_len is None else mem_len,
        steps,
        threads=threads,
        repeats=repeats,
        operators=operators,
        progress=progress,
    )
