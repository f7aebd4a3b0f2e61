"""Segments with memory against a vanilla Transformer that recomputes its window for every token (Dai et al. 2019, 4.5).

Both sides have the same sizes, engine, threads and precision, and are compared with PyTorch or a naive model before
they are timed. A token of the segment side sees M tokens and itself, one of the window side M tokens in all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arithmetic import needed_multiply_adds, step_multiply_adds, window_multiply_adds
from benchmarks.baselines.vanilla import Window, check_window
from benchmarks.configs import BenchmarkConfig, checked_lengths, checked_repeats, checked_threads, load_config
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from benchmarks.operators import library_of, open_checked
from runtimes.base.records import to_json
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.onnx_runtime import Kernel

TABLE_9 = {
    3800: 1874,
    2800: 1409,
    1800: 773,
    800: 363,
}  # attention length: times that Al-Rfou et al. are slower, on one GPU


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention length. window, segment: per token. difference: of the window graph from the naive model, nats;
    tolerance: that `export` held the segment side to against PyTorch, nats. kernel: of both sides."""

    attention_length: int
    window: Timing
    segment: Timing
    window_multiply_adds: float
    segment_multiply_adds: float
    difference: float
    tolerance: float
    kernel: Kernel = "standard"
    needed_multiply_adds: float = 0  # of the segment side per token: what the mask lets through

    @property
    def ratio(self) -> float:
        return self.window.median / self.segment.median

    @property
    def predicted_ratio(self) -> float:
        return self.window_multiply_adds / self.segment_multiply_adds

    @property
    def table_9(self) -> int | None:
        return TABLE_9.get(self.attention_length)

    def to_json(self) -> dict[str, Any]:
        return {
            **to_json(self),
            "ratio": self.ratio,
            "predicted_ratio": self.predicted_ratio,
            "table_9": self.table_9,
        }


def run(
    config: BenchmarkConfig | str,
    *,
    attention_lengths: Sequence[int] | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    kernel: Kernel = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Checks, then measures, both sides at each attention length; what is None is the configuration's own.

    kernel: `standard` operators, or the `fused` one on both sides.
    progress: told what is being done now, a line at a time. Raises ConfigError for settings that cannot be
    measured, ArtefactError when either side computes something else than it should.
    """
    config = load_config(config) if isinstance(config, str) else config
    lengths = checked_lengths(
        config.attention_lengths if attention_lengths is None else list(attention_lengths)
    )
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.repeats)
    weights = random_weights(config.model)
    rows = []
    for length in lengths:
        progress(f"attention length {length}: checking both sides, then timing {repeats} calls of each")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                _measure(
                    config, weights, length, Path(folder), threads=threads, repeats=repeats, kernel=kernel
                )
            )
    return rows


def _measure(
    config: BenchmarkConfig,
    weights: Weights,
    length: int,
    folder: Path,
    *,
    threads: int,
    repeats: int,
    kernel: Kernel,
) -> Row:
    rule, model = MemoryRule(mem_len=length, segment=config.segment), config.model
    draw = np.random.default_rng(length)
    tokens = draw.integers(0, model.vocab_size, max(length, config.segment))
    window = Window(folder / "window", weights, model, length, threads=threads, library=library_of(kernel))
    difference = check_window(window, weights, model, tokens[:length])
    artefact = write_artefact(folder, model, rule, weights, "ring")
    session = open_checked(artefact, threads=threads, kernel=kernel)
    memory, segment = filled_memory(session, draw), tokens[None, : config.segment]
    sides = {
        "window": lambda: window.next_logits(tokens[:length]),
        "segment": lambda: session.step(segment, memory),
    }
    times = take_turns(sides, repeats=repeats)
    return Row(
        attention_length=length, window=times["window"], segment=times["segment"].per(config.segment),
        window_multiply_adds=window_multiply_adds(model, length),
        segment_multiply_adds=step_multiply_adds(model, rule, "ring", config.segment) / config.segment,
        difference=difference, tolerance=session.spec.tolerance, kernel=kernel,
        needed_multiply_adds=needed_multiply_adds(model, rule, config.segment) / config.segment,
    )  # fmt: skip


def filled_memory(session: Session, draw: np.random.Generator) -> Memory:
    """Memory of one stream that has run until all of its memory is of real tokens, once around the ring."""
    memory = session.start(1)
    while memory.positions[0] <= session.rule.slots:
        _, memory = session.step(draw.integers(0, session.vocab.size, (1, session.rule.segment)), memory)
    return memory


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text; the arithmetic limits are each side's multiply-adds at the machine's measured fp32 rate."""
    lines = [
        "           ms per token            times slower            at least, ms per token",
        "attention  window     segments     measured  arithmetic    window     segments     Table 9 (paper, GPU)",
    ]
    for row in rows:
        window, segment = (
            limits.compute_milliseconds(n) for n in (row.window_multiply_adds, row.segment_multiply_adds)
        )
        paper = f"{row.table_9:,}" if row.table_9 else ""
        lines.append(
            f"{row.attention_length:9,}  {row.window.median:<9.4g}  {row.segment.median:<9.3g}    {row.ratio:<8,.0f}  "
            f"{row.predicted_ratio:<10,.0f}    {window:<9.4g}  {segment:<9.3g}    {paper}".rstrip()
        )
    return lines
