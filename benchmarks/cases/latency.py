"""Consecutive tokens one by one: percentiles and jitter with memory of a fixed length and with a growing
cache.

The claim is that after a warm-up no token costs more than three times the median, because the cost is
constant. Before the timed tokens, both sides are fed as many tokens as the memory holds, so that both begin
with the same length. The sides take turns of a hundred tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.arithmetic import step_bytes
from benchmarks.baselines.growing import TOLERANCE, Growing, pytorch_logits
from benchmarks.case import (
    Case,
    CaseRow,
    Claim,
    Column,
    Job,
    Line,
    config_option,
    mem_len_option,
    number,
    repeats_option,
    words,
)
from benchmarks.checked_sessions import Operators, agreed, nats_apart
from benchmarks.measure import Reader, TimesReading, in_turns, milliseconds
from benchmarks.models import random_artefact, random_weights
from benchmarks.plot import draw_latency
from benchmarks.runs import Row as Figures
from benchmarks.runs import Run as Measured
from runtimes import open_session
from runtimes.base.records import to_json

WARM = 20  # untimed tokens before the timed ones
CHECKED = 32  # tokens of the growing cache that are compared with PyTorch before anything is timed
PART = 100  # tokens of one turn, whose median is kept in the history
SETTLE = 3  # untimed tokens before each turn


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One side."""

    side: str
    mem_len: int
    #: Of each token in order.
    milliseconds: tuple[float, ...]
    #: Bytes that the first of them must read.
    num_bytes: int
    #: Of the growing cache from PyTorch, at most, in nats.
    difference: float
    #: Of ONNX Runtime.
    operators: Operators = "standard"
    #: The tokens of the fixed memory, compared with the memory's rate.
    reading: TimesReading | None = None

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.milliseconds, share))

    @property
    def median(self) -> float:
        return self.percentile(50)

    @property
    def jitter(self) -> float:
        """The mean change from one token to the next, in milliseconds."""
        return float(np.abs(np.diff(self.milliseconds)).mean()) if len(self.milliseconds) > 1 else 0.0

    @property
    def medians(self) -> list[float]:
        """The median of each hundred tokens in order, in milliseconds."""
        starts = range(0, len(self.milliseconds), PART)
        return [float(np.median(self.milliseconds[at : at + PART])) for at in starts]

    def to_json(self) -> dict[str, Any]:
        times = self.milliseconds
        token = {"median": self.median, "fastest": min(times), "slowest": max(times), "repeats": len(times)}
        figures = {
            name: value
            for name, value in super().to_json().items()
            if name not in ("milliseconds", "reading")
        }
        return {
            **figures,
            "token": token | {"reading": self.reading and to_json(self.reading)},
            "p90": self.percentile(90),
            "p99": self.percentile(99),
            "jitter": self.jitter,
            "medians": self.medians,
        }


def run(job: Job) -> list[Row]:
    """A row of the artefact and a row of the growing cache; repeats are timed tokens.

    The artefact uses the fused operator if it is built.
    """
    tokens = job.repeats(job.config.consecutive)
    rule = job.rule
    turns = -(-tokens // PART)
    before = rule.slots + WARM
    size = before + SETTLE * turns + tokens + 1
    stream = np.random.default_rng(0).integers(0, job.config.model.vocab_size, size).tolist()
    session = open_session(random_artefact(job), threads=job.threads, device="cpu")
    job.progress("building the graph of the growing cache, and comparing it with PyTorch")
    weights = random_weights(job.config.model)
    growing = Growing(job.folder / "growing", weights, job.config.model, size, threads=job.threads)
    expected = pytorch_logits(weights, job.config.model, np.array(stream))
    first = np.stack([growing.next_logits(token) for token in stream[:CHECKED]])
    difference = compared(first, expected[:CHECKED])
    memory = session.start(1)
    of_fixed = iter(stream)
    of_growing = iter(stream[CHECKED:])
    sides: dict[str, Callable[[], Any]] = {
        "fixed memory": lambda: session.step(np.array([[next(of_fixed)]]), memory),
        "growing cache": lambda: growing.next_logits(next(of_growing)),
    }
    job.progress(
        f"memory of {rule.mem_len} tokens: feeding {before} tokens, then timing {tokens} on each side in "
        f"turns of {PART}"
    )
    milliseconds(sides["fixed memory"], repeats=0, warmup=before)
    milliseconds(sides["growing cache"], repeats=0, warmup=before - CHECKED)
    with contextlib.closing(Reader(job.threads)) as reader:
        found = in_turns(sides, repeats=tokens, turns=turns, warmup=SETTLE, reader=reader, read=sides)
    difference = max(difference, compared(growing.next_logits(stream[-1])[None], expected[-1:]))
    num_bytes = step_bytes(job.config.model, rule, "ring")
    fixed = found["fixed memory"]
    facts: dict[str, Any] = {"mem_len": rule.mem_len, "num_bytes": num_bytes}
    return [
        Row(
            side="fixed memory",
            milliseconds=tuple(fixed.milliseconds),
            difference=0.0,
            operators="fused" if session.kernel == "fused" else "standard",
            reading=TimesReading.of(fixed.milliseconds, fixed.rates, num_bytes),
            **facts,
        ),
        Row(
            side="growing cache",
            milliseconds=tuple(found["growing cache"].milliseconds),
            difference=difference,
            **facts,
        ),
    ]


def compared(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of the growing cache from PyTorch; raises ArtefactError if it is wrong."""
    return agreed(nats_apart(logits, expected), TOLERANCE, "the growing cache differs from PyTorch")


def _timing(name: str) -> Callable[[Figures, Measured], str]:
    return lambda row, run: number(row["token"][name])


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    return [
        f"{row['token']['repeats']:,} consecutive tokens on each side, after {row['mem_len']:,} tokens of "
        "memory."
    ]


def _slowest(lines: Sequence[Line]) -> float:
    token = lines[0].row["token"]
    return float(token["slowest"] / token["median"])


CASE = Case(
    name="latency",
    summary="1,000 consecutive tokens with fixed memory against a key/value cache that grows",
    run=run,
    keys=("side",),
    columns=(
        Column("side", words("side")),
        Column("median, ms", _timing("median")),
        Column("90 % within, ms", lambda row, run: number(row["p90"]), detail=True),
        Column("99 % within, ms", lambda row, run: number(row["p99"])),
        Column("slowest, ms", _timing("slowest")),
        Column("median of the first 100", lambda row, run: number(row["medians"][0])),
        Column("median of the last 100", lambda row, run: number(row["medians"][-1])),
        Column("at least, ms", lambda row, run: number(run.reading(row["num_bytes"])), detail=True),
    ),
    notes=_notes,
    claims=(
        Claim(
            limit="latency_claim",
            text="with fixed memory no token takes more than {limit:g} times the median",
            found="the slowest took {value:.2f} times the median",
            value=_slowest,
        ),
    ),
    options=(config_option, repeats_option, mem_len_option),
    published=lambda history: [history.newest("latency", "enwik8-base")],
    draw=draw_latency,
)
