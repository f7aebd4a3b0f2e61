"""From opening to the first token, and the memory that stays taken: an artefact against its run in PyTorch.

Each repeat is a new process. The files are in the page cache, as on a machine that has opened them before.
Opening verifies the hash of every file on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    Job,
    megabytes,
    number,
)
from benchmarks.child import open_in_child
from benchmarks.measure import Timing
from benchmarks.models import random_artefact, random_run
from runtimes.contract.spec import WEIGHTS

OPENINGS = 5  # of each side; every one starts a process


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One side."""

    side: str
    #: Of NumPy, ONNX Runtime and this project, or PyTorch in place of ONNX Runtime.
    imports: Timing
    #: From the call to the session.
    open: Timing
    #: From the session to the first logits.
    token: Timing
    #: Of the process after that token; None where the system does not tell.
    resident_bytes: int | None
    #: Of the weights and of the memory of one stream.
    needed_bytes: int


def run(job: Job) -> Iterator[Row]:
    """A row of the artefact and a row of the run."""
    repeats = job.repeats(min(job.config.repeats, OPENINGS))
    sides = {"artefact": random_artefact(job), "run in PyTorch": random_run(job)}
    weights = (sides["artefact"] / WEIGHTS).stat().st_size
    job.progress(f"opening each side in {repeats} new processes")
    reports: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, folder in sides.items():
            reports[side].append(open_in_child(folder, threads=job.threads))
    for side, of_side in reports.items():
        resident = [report["resident_bytes"] for report in of_side]
        yield Row(
            side=side,
            imports=_timing(of_side, "imports"),
            open=_timing(of_side, "open"),
            token=_timing(of_side, "first_token"),
            resident_bytes=None if None in resident else round(median(resident)),
            needed_bytes=weights + of_side[0]["memory_bytes"],
        )


def _timing(reports: Sequence[dict[str, Any]], name: str) -> Timing:
    return Timing.of([report[name] * 1e3 for report in reports])


CASE = Case(
    name="load",
    summary="from opening to the first token, and the memory that stays in use: artefact against run",
    run=run,
    keys=("side",),
    columns=(
        Column("side", "side"),
        Column("imports, ms", "imports"),
        Column("opening, ms", "open"),
        Column("first token, ms", "token"),
        Column(
            "at least, ms",
            lambda row, run: number(run.reading(row["needed_bytes"])),
            note="At least: reading weights and memory once, at the measured rate.",
            detail=True,
        ),
        Column("resident MB", "resident_bytes", megabytes),
        Column("weights and memory, MB", "needed_bytes", megabytes),
    ),
    options=("config", "repeats"),
    published=lambda history: [history.newest("load", "enwik8-large")],
)
