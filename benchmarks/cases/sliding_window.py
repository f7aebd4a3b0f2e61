"""Segments with memory against a vanilla Transformer that recomputes its window for every token.

This is section 4.5 of Dai et al. (2019). Both sides have the same sizes, engine, threads and precision, and
are compared with PyTorch or with a naive model before they are timed. A token of the segment side sees M
tokens and itself; a token of the window side sees M tokens, itself included.
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
from benchmarks.checked_sessions import Operators, fused_library, open_checked
from benchmarks.configs import BenchmarkConfig, checked_lengths, checked_repeats, checked_threads, load_config
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from runtimes.base.records import to_json
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session

TABLE_9 = {
    3800: 1874,
    2800: 1409,
    1800: 773,
    800: 363,
}  # by attention length: how many times slower the model of Al-Rfou et al. is, on one GPU


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention length. window, segment: times per token. operators: of both sides.

    difference: of the window graph from the naive model, in nats. tolerance: of the comparison of the segment
    side with PyTorch, in nats. needed_multiply_adds: of the segment side per token, only for visible keys; 0
    in results that did not record it.
    """

    attention_length: int
    window: Timing
    segment: Timing
    window_multiply_adds: float
    segment_multiply_adds: float
    difference: float
    tolerance: float
    operators: Operators = "standard"
    needed_multiply_adds: float = 0

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
    operators: Operators = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each attention length, whose two sides are checked before they are timed.

    An argument that is None is taken from the configuration. operators: of both sides. progress: is called
    with a line of text before each piece of work. Raises ConfigError for settings that cannot be measured,
    and ArtefactError where one side computes wrong answers.
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
                    config,
                    weights,
                    length,
                    Path(folder),
                    threads=threads,
                    repeats=repeats,
                    operators=operators,
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
    operators: Operators,
) -> Row:
    rule, model = MemoryRule(mem_len=length, segment=config.segment), config.model
    draw = np.random.default_rng(length)
    tokens = draw.integers(0, model.vocab_size, max(length, config.segment))
    window = Window(
        folder / "window", weights, model, length, threads=threads, library=fused_library(operators)
    )
    difference = check_window(window, weights, model, tokens[:length])
    artefact = write_artefact(folder, model, rule, weights, "ring")
    session = open_checked(artefact, threads=threads, operators=operators)
    memory, segment = filled_memory(session, draw), tokens[None, : config.segment]
    sides = {
        "window": lambda: window.next_logits(tokens[:length]),
        "segment": lambda: session.step(segment, memory),
    }
    times = take_turns(sides, repeats=repeats)
    return Row(
        attention_length=length,
        window=times["window"],
        segment=times["segment"].per(config.segment),
        window_multiply_adds=window_multiply_adds(model, length),
        segment_multiply_adds=step_multiply_adds(model, rule, "ring", config.segment) / config.segment,
        difference=difference,
        tolerance=session.spec.tolerance,
        operators=operators,
        needed_multiply_adds=needed_multiply_adds(model, rule, config.segment) / config.segment,
    )


def filled_memory(session: Session, draw: np.random.Generator) -> Memory:
    """The memory of one stream that has run once around the ring, so that all of it holds real tokens."""
    memory = session.start(1)
    while memory.positions[0] <= session.rule.slots:
        _, memory = session.step(draw.integers(0, session.vocab.size, (1, session.rule.segment)), memory)
    return memory


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text. at least: the time of the multiply-adds at the measured rate of the machine."""
    lines = [
        "           ms per token            window / segments       at least, ms per token",
        "attention  window     segments     measured  arithmetic    window     segments     Table 9 (GPU)",
    ]
    for row in rows:
        window, segment = (
            limits.compute_milliseconds(n) for n in (row.window_multiply_adds, row.segment_multiply_adds)
        )
        paper = f"{row.table_9:,}" if row.table_9 else ""
        lines.append(
            f"{row.attention_length:9,}  {row.window.median:<9.4g}  {row.segment.median:<9.3g}    "
            f"{row.ratio:<8,.0f}  {row.predicted_ratio:<10,.0f}    "
            f"{window:<9.4g}  {segment:<9.3g}    {paper}".rstrip()
        )
    return lines
