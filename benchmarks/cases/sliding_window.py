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
from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    config_option,
    lengths_option,
    milliseconds,
    number,
    operators_option,
    repeats_option,
    whole,
)
from benchmarks.checked_sessions import Operators, fused_library, open_checked
from benchmarks.configs import CONFIGS, BenchmarkConfig, checked_lengths, checked_repeats, checked_threads
from benchmarks.measure import Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from benchmarks.plot import draw_sliding_window
from benchmarks.runs import History, Run
from benchmarks.runs import Row as Figures
from benchmarks.runs import operators as operators_of
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
class Row(CaseRow):
    """One attention length."""

    attention_length: int
    #: Times per token.
    window: Timing
    segment: Timing
    window_multiply_adds: float
    segment_multiply_adds: float
    #: Of the window graph from the naive model, in nats.
    difference: float
    #: Of the comparison of the segment side with PyTorch, in nats.
    tolerance: float
    #: Of both sides.
    operators: Operators = "standard"
    #: Of the segment side per token, only for visible keys; 0 in results that did not record it.
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
            **super().to_json(),
            "ratio": self.ratio,
            "predicted_ratio": self.predicted_ratio,
            "table_9": self.table_9,
        }


def run(
    config: BenchmarkConfig,
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
    lengths = checked_lengths(
        config.attention_lengths if attention_lengths is None else list(attention_lengths)
    )
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, config.repeats)
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
    rule = MemoryRule(mem_len=length, segment=config.segment)
    model = config.model
    draw = np.random.default_rng(length)
    tokens = draw.integers(0, model.vocab_size, max(length, config.segment))
    window = Window(
        folder / "window", weights, model, length, threads=threads, library=fused_library(operators)
    )
    difference = check_window(window, weights, model, tokens[:length])
    artefact = write_artefact(folder, model, rule, weights, "ring")
    session = open_checked(artefact, threads=threads, operators=operators)
    memory = filled_memory(session, draw)
    segment = tokens[None, : config.segment]
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


def _paper(row: Figures, run: Run) -> str:
    if not row["table_9"]:
        return ""
    return f"{row['table_9']:,}" + ("" if row["ratio"] >= row["table_9"] else " **MISSED**")


CASE = Case(
    name="sliding-window",
    summary="segments with memory against a window recomputed for each token (Table 9 of Dai et al.)",
    run=run,
    keys=("attention_length", "operators"),
    columns=(
        Column("attention length", whole("attention_length")),
        Column("operators", lambda row, run: operators_of(row)),
        Column("window, ms per token", milliseconds("window")),
        Column(
            "at least",
            lambda row, run: number(run.computing(row["window_multiply_adds"])),
            note="At least: the multiply-adds at the measured rate; for segments only those that the mask "
            "lets through, if the run recorded them.",
            detail=True,
        ),
        Column("segments, ms per token", milliseconds("segment")),
        Column(
            "at least",
            lambda row, run: number(
                run.computing(row.get("needed_multiply_adds") or row["segment_multiply_adds"])
            ),
            detail=True,
        ),
        Column("times slower", lambda row, run: f"{row['ratio']:,.0f}"),
        Column("by arithmetic only", lambda row, run: f"{row['predicted_ratio']:,.0f}"),
        Column("Table 9 (GPU)", _paper),
    ),
    notes=lambda lines: ["MISSED: measured below the ratio of the paper's Table 9."],
    options=(config_option, repeats_option, lengths_option, operators_option),
    published=lambda history: [published(history, operators) for operators in ("standard", "fused")],
    draw=draw_sliding_window,
)


def published(history: History, operators: str) -> Run:
    """The newest run with all attention lengths of the paper's Table 9."""
    lengths = CONFIGS["enwik8-base"].attention_lengths
    return history.newest(
        "sliding-window", "enwik8-base", operators=operators, rows=("attention_length", lengths)
    )
