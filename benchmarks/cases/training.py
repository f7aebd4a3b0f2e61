"""A training step in PyTorch with memory as long as the segment, and without: what recurrence costs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.arithmetic import step_multiply_adds
from benchmarks.cases.learning.architectures import check
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Limits, Timing, take_turns
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from trainer.run.config import TrainConfig
from trainer.training.state import Training

PASSES = 3  # forward, and backward with twice as many multiply-adds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One memory length. token: the time of one trained token; ratio: this time over the one without memory.

    multiply_adds: of one token, forward and backward.
    """

    mem_len: int
    batch: int
    token: Timing
    ratio: float
    multiply_adds: float

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def run(
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row with memory and a row without. An argument that is None is taken from the configuration."""
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.repeats)
    batch, T = config.training_batch, config.segment
    sides: dict[int, Callable[[], Any]] = {}
    for mem_len in (T, 0):
        rule = MemoryRule(mem_len=mem_len, segment=T, mask="full")
        recipe = TrainConfig(
            model=config.model, training=rule, evaluation=rule, vocab="byte", batch=batch, threads=threads
        )
        progress(f"memory of {mem_len} tokens: comparing the attention of training with the naive one")
        check(recipe)
        sides[mem_len] = _step(recipe)
    progress(f"timing {repeats} steps of {batch} x {T} tokens for each")
    times = {
        name: timing.per(batch * T) for name, timing in take_turns(_named(sides), repeats=repeats).items()
    }
    rows = []
    for mem_len in sides:
        rule = MemoryRule(mem_len=mem_len, segment=T)
        rows.append(
            Row(
                mem_len=mem_len,
                batch=batch,
                token=times[str(mem_len)],
                ratio=times[str(mem_len)].median / times["0"].median,
                multiply_adds=PASSES * step_multiply_adds(config.model, rule, "hidden", T) / T,
            )
        )
    return rows


def _step(recipe: TrainConfig) -> Callable[[], Any]:
    training = Training.start(dataclasses.replace(recipe, steps=1 << 20))
    shape = (recipe.batch, 64 * recipe.training.segment + 1)
    tokens = np.random.default_rng(0).integers(0, recipe.model.vocab_size, shape)
    return lambda: training.advance(tokens)


def _named(sides: dict[int, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    return {str(name): call for name, call in sides.items()}


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text. at least: the time of the multiply-adds at the measured rate of the machine."""
    lines = ["memory  batch  ms per token  at least  / without  tokens/s"]
    for row in rows:
        least = limits.compute_milliseconds(row.multiply_adds)
        lines.append(
            f"{row.mem_len:<6,}  {row.batch:<5}  {row.token.median:<12.4g}  {least:<8.3g}  "
            f"{row.ratio:<9.2f}  {1e3 / row.token.median:,.0f}"
        )
    return lines
