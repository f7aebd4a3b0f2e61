"""From opening to the first token, and the memory that stays taken: an artefact against its run in PyTorch.

Each repeat is a new process. The files are in the page cache, as on a machine that has opened them before.
Opening verifies the hash of every file on both sides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    config_option,
    megabytes,
    milliseconds,
    number,
    repeats_option,
    words,
)
from benchmarks.child import in_child
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Timing
from benchmarks.models import random_weights, write_artefact
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import WEIGHTS

OPENINGS = 5  # of each side; every one starts a process


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One side."""

    side: str
    #: Of the packages.
    imports: Timing
    #: From the call to the session.
    open: Timing
    #: From the session to the first logits.
    token: Timing
    #: Of the process after that token; None where the system does not tell.
    resident_bytes: int | None
    #: Of the weights and of the memory of one stream.
    needed_bytes: int


def run(
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row of the artefact and a row of the run. None is the value of the configuration."""
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, min(config.repeats, OPENINGS))
    rule = MemoryRule(mem_len=config.mem_len, segment=config.segment)
    with tempfile.TemporaryDirectory() as name:
        progress("exporting and comparing with PyTorch")
        artefact = write_artefact(Path(name), config.model, rule, random_weights(config.model), "ring")
        weights = (artefact / WEIGHTS).stat().st_size
        sides = {
            "artefact": artefact,
            "run in PyTorch": artefact.with_name(artefact.name.replace("artefact", "run")),
        }
        progress(f"opening each side in {repeats} new processes")
        reports: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, folder in sides.items():
                reports[side].append(in_child("open", folder, threads=threads))
    return [_row(side, of_side, weights) for side, of_side in reports.items()]


def _row(side: str, reports: Sequence[dict[str, Any]], weights: int) -> Row:
    resident = [report["resident_bytes"] for report in reports]
    return Row(
        side=side,
        imports=_timing(reports, "imports"),
        open=_timing(reports, "open"),
        token=_timing(reports, "first_token"),
        resident_bytes=None if None in resident else round(median(resident)),
        needed_bytes=weights + reports[0]["memory_bytes"],
    )


def _timing(reports: Sequence[dict[str, Any]], name: str) -> Timing:
    times = [report[name] * 1e3 for report in reports]
    return Timing(median=median(times), fastest=min(times), slowest=max(times), repeats=len(times))


CASE = Case(
    name="load",
    summary="from opening to the first token, and the memory that stays in use: artefact against run",
    run=run,
    keys=("side",),
    columns=(
        Column("side", words("side")),
        Column("imports, ms", milliseconds("imports")),
        Column("opening, ms", milliseconds("open")),
        Column("first token, ms", milliseconds("token")),
        Column(
            "at least, ms",
            lambda row, run: number(run.reading(row["needed_bytes"])),
            note="At least: reading weights and memory once, at the measured rate.",
            detail=True,
        ),
        Column("resident MB", lambda row, run: megabytes(row["resident_bytes"])),
        Column("weights and memory, MB", lambda row, run: megabytes(row["needed_bytes"])),
    ),
    options=(config_option, repeats_option),
    published=lambda history: [history.newest("load", "enwik8-large")],
)
