"""One token with full memory at several memory lengths: what generation costs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.checked_sessions import Operators
from benchmarks.configs import BenchmarkConfig, checked_lengths, checked_repeats, checked_threads
from benchmarks.steps import Progress, Row, measure_steps, table

__all__ = ["Row", "run", "table"]


def run(
    config: BenchmarkConfig,
    *,
    attention_lengths: Sequence[int] | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    operators: Operators = "standard",
    progress: Progress = lambda line: None,
) -> list[Row]:
    """A row for each memory length. An argument that is None is taken from the configuration."""
    lengths = checked_lengths(
        list(config.attention_lengths if attention_lengths is None else attention_lengths)
    )
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.token_repeats)
    return [
        row
        for length in lengths
        for row in measure_steps(
            config, length, [(1, 1)], threads=threads, repeats=repeats, operators=operators, progress=progress
        )
    ]
