"""One token in WebAssembly with memory in place, against copies, Node's ONNX Runtime, Python's and C++.

Every side first replays the artefact's reference. All have one thread and the same graph with standard
operators. Copies are what the public interface of onnxruntime-web does. A token is measured early in a text
and after 10,000 tokens: it costs the same. WebAssembly runs in Node, whose compiler is that of Chromium.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import REST, Limits, Timing
from benchmarks.models import random_weights, write_artefact
from benchmarks.web_sides import CppSide, NodeSide, PythonSide, Side, has_cpp, has_native, missing_for_node
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule

EARLY, LATE = 100, 10_000  # tokens that a stream has seen
TURNS, WARMUP = 5, 5
IN_PLACE, COPIES, NATIVE, PYTHON, CPP = "WebAssembly", "WebAssembly, copies", "Node", "Python", "C++"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side. late: a token after 10,000 others; in C++ one with full memory. early: a token after 100
    others; None for C++. difference: the largest from the reference, in nats. times_cpp: `late` over that of
    C++; None where C++ cannot be compiled.
    """

    side: str
    mem_len: int
    late: Timing
    early: Timing | None
    difference: float
    times_cpp: float | None

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def unavailable() -> str | None:
    """Why this machine cannot measure the case; None where it can."""
    return missing_for_node()


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each side that runs here, all measured in turns. An argument that is None is taken from the
    configuration; `threads` is checked, and every side has one.
    """
    checked_threads(threads)
    repeats = checked_repeats(repeats, config.token_repeats)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        progress("exporting and comparing with PyTorch")
        folder = Path(name)
        artefact = write_artefact(folder, config.model, rule, random_weights(config.model), "ring")
        sides = _opened(artefact, folder)
        for side in sides.values():
            stack.callback(side.close)
        differences = {}
        for label, side in sides.items():
            progress(f"{label}: replaying the reference, then {LATE:,} tokens")
            differences[label] = side.difference()
            side.feed("early", EARLY)
            side.feed("late", LATE)
        progress(f"timing {repeats} tokens of each side, early and late, in {TURNS} turns")
        times = _in_turns(sides, repeats)
    cpp = times[CPP]["late"].median if CPP in times else None
    return [
        Row(
            side=label,
            mem_len=rule.mem_len,
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
        label: {
            stream: Timing(median=median(ms), fastest=min(ms), slowest=max(ms), repeats=len(ms))
            for stream, ms in streams.items()
        }
        for label, streams in found.items()
    }


def table(rows: Sequence[Row], limits: Limits, *, web_claim: tuple[float, float] | None = None) -> list[str]:
    """The rows as text, and whether the claim holds; see `BenchmarkConfig.web_claim`."""
    lines = ["                     ms per token                     times    largest difference"]
    lines += ["side                 after 100  after 10,000  ratio   C++      from the reference, nats"]
    for row in rows:
        early = f"{row.early.median:<9.3g}" if row.early else f"{'':9}"
        ratio = f"{row.late.median / row.early.median:<6.2f}" if row.early else f"{'':6}"
        times = f"{row.times_cpp:<7.2f}" if row.times_cpp else f"{'':7}"
        lines.append(
            f"{row.side:19}  {early}  {row.late.median:<12.3g}  {ratio}  {times}  {row.difference:.1e}"
        )
    by_side = {row.side: row for row in rows}
    in_place, copies = by_side[IN_PLACE], by_side[COPIES]
    if web_claim is not None:
        most, least = web_claim
        gain = copies.late.median / in_place.late.median
        if in_place.times_cpp is not None:
            lines.append(
                f"in place takes {in_place.times_cpp:.2f} times as long as C++, and at most {most:g} is "
                f"claimed: {'holds' if in_place.times_cpp <= most else 'DOES NOT HOLD'}"
            )
        lines.append(
            f"copies take {gain:.2f} times as long as in place, and at least {least:g} is claimed: "
            f"{'holds' if gain >= least else 'DOES NOT HOLD'}"
        )
    return lines
