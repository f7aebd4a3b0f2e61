"""Segments with memory against a vanilla Transformer that recomputes its window for every token.

This is section 4.5 of Dai et al. (2019). Both sides have the same sizes, engine, threads and precision, and
are compared with PyTorch or with a naive model before they are timed. A token of the segment side sees M
tokens and itself; a token of the window side sees M tokens, itself included.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.arithmetic import needed_multiply_adds, window_multiply_adds
from benchmarks.baselines.vanilla import Window, check_window
from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    Job,
    config_option,
    lengths_option,
    milliseconds,
    number,
    operators_option,
    repeats_option,
    whole,
)
from benchmarks.checked_sessions import Operators, filled, fused_library, open_checked
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_artefact, random_weights
from benchmarks.plot import draw_lines
from benchmarks.runs import Row as Figures
from benchmarks.runs import Run
from benchmarks.runs import operators as operators_of
from benchmarks.summaries import sliding_window
from trainer.model.arithmetic import step_multiply_adds

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


def run(job: Job) -> Iterator[Row]:
    """A row for each attention length, whose two sides are checked before they are timed."""
    config = job.config
    repeats = job.repeats(config.repeats)
    weights = random_weights(config.model)
    for length in job["attention_lengths"] or config.attention_lengths:
        at = job.with_memory(length)
        job.progress(f"attention length {length}: checking both sides, then timing {repeats} calls of each")
        draw = np.random.default_rng(length)
        tokens = draw.integers(0, config.model.vocab_size, max(length, config.segment))
        window = Window(
            at.folder / "window",
            weights,
            config.model,
            length,
            threads=job.threads,
            library=fused_library(job.operators),
        )
        difference = check_window(window, weights, config.model, tokens[:length])
        session = open_checked(random_artefact(at), threads=job.threads, operators=job.operators)
        memory = filled(session)
        segment = tokens[None, : config.segment]
        sides = {
            "window": functools.partial(window.next_logits, tokens[:length]),
            "segment": functools.partial(session.step, segment, memory),
        }
        times = take_turns(sides, repeats=repeats)
        multiply_adds = step_multiply_adds(config.model, at.rule, "ring", config.segment)
        yield Row(
            attention_length=length,
            window=times["window"],
            segment=times["segment"].per(config.segment),
            window_multiply_adds=window_multiply_adds(config.model, length),
            segment_multiply_adds=multiply_adds / config.segment,
            difference=difference,
            tolerance=session.spec.tolerance,
            operators=job.operators,
            needed_multiply_adds=needed_multiply_adds(config.model, at.rule, config.segment) / config.segment,
        )


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
    published=lambda history: [sliding_window(history, operators) for operators in ("standard", "fused")],
    draw=draw_lines(
        "attention_length",
        {
            "vanilla Transformer, window recomputed for each token": "window",
            "Transformer-XL, segments with memory": "segment",
        },
        "attention length (tokens)",
        log=True,
    ),
)
