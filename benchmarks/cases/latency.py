"""Consecutive tokens one by one: percentiles and jitter with memory of a fixed length and with a growing
cache.

The claim is that after a warm-up no token costs more than three times the median, because the cost is
constant. Before the timed tokens, both sides are fed as many tokens as the memory holds, so that both begin
with the same length. The sides take turns of a hundred tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.arithmetic import step_bytes
from benchmarks.baselines.growing import Growing, check_growing, pytorch_logits
from benchmarks.case import (
    Case,
    CaseRow,
    Claim,
    Column,
    Line,
    config_option,
    mem_len_option,
    number,
    repeats_option,
    words,
)
from benchmarks.checked_sessions import Operators
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Reader, TimesReading
from benchmarks.models import random_weights, write_artefact
from benchmarks.plot import draw_latency
from benchmarks.runs import Row as Figures
from benchmarks.runs import Run as Measured
from runtimes import open_session
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule

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


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row of the artefact and a row of the growing cache. repeats: the number of timed tokens.

    An argument that is None is taken from the configuration. The artefact uses the fused operator where it is
    built.
    """
    threads = checked_threads(threads)
    tokens = checked_repeats(repeats, config.consecutive)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    weights = random_weights(config.model)
    draw = np.random.default_rng(0)
    untimed = rule.slots + WARM + SETTLE * math.ceil(tokens / PART)
    stream = draw.integers(0, config.model.vocab_size, untimed + tokens + 1).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("exporting, building the graph of the growing cache, and comparing both with PyTorch")
        artefact = write_artefact(folder, config.model, rule, weights, "ring")
        session = open_session(artefact, threads=threads, device="cpu")
        growing = Growing(folder / "growing", weights, config.model, len(stream), threads=threads)
        expected = pytorch_logits(weights, config.model, np.array(stream))
        difference = check_growing(
            np.stack([growing.next_logits(token) for token in stream[:CHECKED]]), expected[:CHECKED]
        )
        memory = session.start(1)

        def fixed(token: int) -> None:
            session.step(np.array([[token]]), memory)

        progress(
            f"memory of {rule.mem_len} tokens: feeding {rule.slots + WARM} tokens, then timing {tokens} on "
            f"each side in turns of {PART}"
        )
        with contextlib.closing(Reader(threads)) as reader:
            (fixed_times, rates), (growing_times, _) = in_turns(
                [(fixed, stream[:-1]), (growing.next_logits, stream[CHECKED:-1])], tokens, reader
            )
        difference = max(difference, check_growing(growing.next_logits(stream[-1])[None], expected[-1:]))
    operators: Operators = "fused" if session.kernel == "fused" else "standard"
    num_bytes = step_bytes(config.model, rule, "ring")
    facts: dict[str, Any] = {"mem_len": rule.mem_len, "num_bytes": num_bytes}
    return [
        Row(
            side="fixed memory",
            milliseconds=fixed_times,
            difference=0.0,
            operators=operators,
            reading=TimesReading.of(fixed_times, rates, num_bytes),
            **facts,
        ),
        Row(side="growing cache", milliseconds=growing_times, difference=difference, **facts),
    ]


def in_turns(
    sides: Sequence[tuple[Callable[[int], object], Sequence[int]]], count: int, reader: Reader
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """For each side, the milliseconds of each of the last `count` tokens, and the memory's rate at each.

    sides: a function that takes one token, and its stream of tokens, of which those before the last are fed
    untimed. The sides take turns of `PART` consecutive tokens, so that a machine that slows down slows all of
    them. A rest and some untimed tokens begin each turn.
    """
    turns = [range(min(PART, count - at)) for at in range(0, count, PART)]
    streams = [iter(tokens) for _, tokens in sides]
    times: list[list[float]] = [[] for _ in sides]
    rates: list[list[float]] = [[] for _ in sides]
    for (feed, tokens), stream in zip(sides, streams, strict=True):
        for token in itertools.islice(stream, len(tokens) - count - SETTLE * len(turns)):
            feed(token)
    for turn in turns:
        for (feed, _), stream, durations, beside in zip(sides, streams, times, rates, strict=True):
            time.sleep(measure.REST)
            for token in itertools.islice(stream, SETTLE):
                feed(token)
            taken, memory = reader.beside([functools.partial(feed, next(stream)) for _ in turn])
            durations += taken
            beside += memory
    return [(tuple(ms), tuple(memory)) for ms, memory in zip(times, rates, strict=True)]


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
