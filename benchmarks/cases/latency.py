"""Consecutive tokens one by one: percentiles with memory of a fixed length and with a growing cache.

Before the timed tokens, both sides read enough tokens to fill the fixed memory, so both begin with the same
length. The sides take turns of a hundred tokens.

The growing side is the same model with the same kernel and room for all tokens, as in `growing-cache`: no
token is dropped, and nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.cases.growing_cache import compare_from_the_start, growing_sessions
from benchmarks.checked_sessions import open_checked
from benchmarks.harness import Job, Row
from benchmarks.measure import milliseconds, take_turns, timing
from benchmarks.models import artefact_of, run_of
from benchmarks.plots import line
from runtimes.contract.session import Session
from trainer.run.checkpoint import load_run

TOKENS = 1000
TURN_TOKENS = 100  # tokens of one side before the other one; the history keeps their median
WARMUP_TOKENS = 3  # untimed tokens before each turn


def run(job: Job) -> Iterator[Row]:
    """A row for each side, after both gave the same answers; --repeats is the number of timed tokens."""
    tokens = job.repeats(TOKENS)
    turns = -(-tokens // TURN_TOKENS)
    before = job.rule.slots + 1
    capacity = before + WARMUP_TOKENS * turns + tokens
    fixed = open_checked(artefact_of(job), threads=job.threads, operators="fused")
    with growing_sessions(load_run(run_of(job)), capacity, threads=job.threads) as (growing, _):
        job.say("comparing the growing cache with the fixed memory")
        compare_from_the_start(fixed, growing, job.rule.mem_len)
        sides = {"fixed memory": _stream(fixed), "growing cache": _stream(growing)}
        job.say(f"feeding {before} tokens, then timing {tokens} on each side in turns of {TURN_TOKENS}")
        for side in sides.values():
            milliseconds(side.__next__, repeats=0, warmup=before)
        calls = {name: side.__next__ for name, side in sides.items()}
        times = take_turns(calls, repeats=tokens, turns=turns, warmup=WARMUP_TOKENS)
    for name, ms in times.items():
        starts = [tokens * turn // turns for turn in range(turns + 1)]
        yield {
            "side": name,
            "mem_len": job.rule.mem_len,
            "operators": "fused",
            "token_ms": timing(ms),
            "p99_ms": float(np.percentile(ms, 99)),
            "turn_medians_ms": [float(np.median(ms[a:b])) for a, b in itertools.pairwise(starts)],
        }


def _stream(session: Session) -> Iterator[None]:
    """Computes one more token of a stream each time."""
    memory = session.start(1)
    for token in itertools.count():
        session.step(np.array([[token % session.vocab.size]]), memory)
        yield


def draw(figure: Any, rows: Sequence[Row]) -> str:
    """Draws the median of each hundred tokens of both sides; returns the title."""
    axes = figure.subplots()
    for row in rows:
        medians = row["turn_medians_ms"]
        after = [row["mem_len"] + TURN_TOKENS * (at + 1) for at in range(len(medians))]
        line(axes, after, medians, row["side"], ours=row["side"] == "fixed memory")
    axes.set_xlabel("tokens so far", fontsize=9)
    axes.set_ylabel(f"ms per token (median of {TURN_TOKENS})", fontsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return "Consecutive tokens with fixed memory and with a growing cache"


KEYS = ("side", "mem_len", "operators")
COLUMNS = {
    "side": "side",
    "memory at the start, tokens": "mem_len",
    "tokens": lambda row, _: row["token_ms"]["repeats"],
    "median, ms": "token_ms",
    "99 % within, ms": "p99_ms",
    "slowest, ms": lambda row, _: row["token_ms"]["slowest"],
    "slowest / median": lambda row, _: row["token_ms"]["slowest"] / row["token_ms"]["median"],
    "first 100, ms": lambda row, _: row["turn_medians_ms"][0],
    "last 100, ms": lambda row, _: row["turn_medians_ms"][-1],
}
