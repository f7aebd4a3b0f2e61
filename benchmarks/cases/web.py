"""One token in WebAssembly with memory in place, against copies, Node's ONNX Runtime, Python's and C++.

Every side first replays the artefact's reference. All have one thread and the same graph with standard
operators. Copies are what the public interface of onnxruntime-web does. A token is measured early in a text
and after 10,000 tokens: it costs the same. WebAssembly runs in Node, which has Chromium's compiler.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import (
    Case,
    CaseRow,
    Claim,
    Column,
    Job,
    Line,
    config_option,
    decimal,
    mem_len_option,
    milliseconds,
    repeats_option,
    words,
)
from benchmarks.measure import REST, Timing
from benchmarks.models import random_artefact
from benchmarks.web_sides import CppSide, NodeSide, PythonSide, Side, has_cpp, has_native, missing_for_node

EARLY = 100  # tokens that a stream has seen
LATE = 10_000
TURNS = 5
WARMUP = 5
IN_PLACE = "WebAssembly"
COPIES = "WebAssembly, copies"
NATIVE = "Node"
PYTHON = "Python"
CPP = "C++"


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One side."""

    side: str
    mem_len: int
    #: A token after 10,000 others; in C++ one with full memory.
    late: Timing
    #: A token after 100 others; None for C++.
    early: Timing | None
    #: The largest from the reference, in nats.
    difference: float
    #: `late` divided by the time of C++; None where C++ cannot be compiled.
    times_cpp: float | None


def run(job: Job) -> list[Row]:
    """A row for each side that runs here, all measured in turns. Every side has one thread."""
    repeats = job.repeats(job.config.token_repeats)
    artefact = random_artefact(job)
    with contextlib.ExitStack() as stack:
        sides = _opened(artefact, job.folder)
        for side in sides.values():
            stack.callback(side.close)
        differences = {}
        for label, side in sides.items():
            job.progress(f"{label}: replaying the reference, then {LATE:,} tokens")
            differences[label] = side.difference()
            side.feed("early", EARLY)
            side.feed("late", LATE)
        job.progress(f"timing {repeats} tokens of each side, early and late, in {TURNS} turns")
        times = _in_turns(sides, repeats)
    cpp = times[CPP]["late"].median if CPP in times else None
    return [
        Row(
            side=label,
            mem_len=job.rule.mem_len,
            late=times[label]["late"],
            early=times[label].get("early"),
            difference=differences[label],
            times_cpp=None if cpp is None else times[label]["late"].median / cpp,
        )
        for label in sides
    ]


def _opened(artefact: Path, folder: Path) -> dict[str, Side]:
    sides: dict[str, Side] = {
        IN_PLACE: NodeSide(artefact, "wasm"),
        COPIES: NodeSide(artefact, "wasm", copies=True),
    }
    if has_native():
        sides[NATIVE] = NodeSide(artefact, "native")
    sides[PYTHON] = PythonSide(artefact)
    if has_cpp():
        sides[CPP] = CppSide(artefact, folder)
    return sides


def _in_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, dict[str, Timing]]:
    """A timing of every side and stream, in turns, so that a machine that slows down slows all sides."""
    share = -(-repeats // TURNS)
    found: dict[str, dict[str, list[float]]] = {
        label: {stream: [] for stream in (("late",) if label == CPP else ("early", "late"))}
        for label in sides
    }
    for _ in range(TURNS):
        for label, streams in found.items():
            time.sleep(REST)
            for stream, times in streams.items():
                warmup = 0 if label == CPP else WARMUP
                times += sides[label].times(stream, share + warmup)[warmup:]
    return {
        label: {stream: Timing.of(ms) for stream, ms in streams.items()} for label, streams in found.items()
    }


def _late(lines: Sequence[Line], side: str) -> float | None:
    return next((float(row["late"]["median"]) for row, _ in lines if row["side"] == side), None)


def _times(side: str, other: str) -> Callable[[Sequence[Line]], float | None]:
    """How many times as long a late token takes on one side as on the other, if both were measured."""

    def ratio_of(lines: Sequence[Line]) -> float | None:
        one = _late(lines, side)
        two = _late(lines, other)
        return None if one is None or two is None else one / two

    return ratio_of


CASE = Case(
    name="web",
    summary="one token in WebAssembly, in place and with copies, against Node, Python and C++",
    run=run,
    keys=("side", "mem_len"),
    columns=(
        Column("side", words("side")),
        Column("ms per token after 100", milliseconds("early")),
        Column(f"ms per token after {LATE:,}", milliseconds("late")),
        Column(
            "late / early",
            lambda row, run: f"{row['late']['median'] / row['early']['median']:.2f}" if row["early"] else "",
        ),
        Column("times C++", decimal("times_cpp")),
        Column("differs from the reference at most by, nats", decimal("difference", ".1e")),
    ),
    claims=(
        Claim(
            limit="web_most",
            text="in place takes at most {limit:g} times as long as C++",
            found="it took {value:.2f} times as long",
            value=_times(IN_PLACE, CPP),
        ),
        Claim(
            limit="web_least",
            text="copies take at least {limit:g} times as long as in place",
            found="they took {value:.2f} times as long",
            value=_times(COPIES, IN_PLACE),
            least=True,
        ),
    ),
    options=(config_option, repeats_option, mem_len_option),
    unavailable=missing_for_node,
)
