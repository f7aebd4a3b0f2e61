"""One token while other processes compute: a session's own number of threads, one thread, and all of them.

Sessions are opened while the machine is idle. Then 0, 1, 2 and 9 other processes compute without a pause. In
each state the sides take turns of a few dozen tokens.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.case import Case, Cell, Column, Job, Line, number, option
from benchmarks.checked_sessions import agreed, fed
from benchmarks.measure import in_turns
from benchmarks.models import random_run
from benchmarks.runs import Figures, Run
from runtimes import Session, open_session
from runtimes.base.machine import available_cpus
from xl_export import export

OTHERS = (0, 1, 2, 9)  # processes
TURN = 50  # tokens of one side before the next one
SETTLE = 5  # untimed tokens at the beginning of a turn
STARTED = 0.5  # seconds until other processes compute
TOLERANCE = 1e-4  # nats between the sides
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side in one state of the machine. Times are milliseconds of wall-clock time per token."""

    others: int  # processes that compute at the same time
    side: str
    precision: str
    mean: float
    median: float
    p99: float
    repeats: int


def run(job: Job) -> Iterator[Row]:
    """A row for each side in each state, after all sides gave the same answers."""
    tokens = job.repeats(600)
    job.progress("exporting, and comparing the artefact with PyTorch")
    artefact = export(random_run(job), job.folder / "artefact", precision=job["precision"])
    sides = {DEFAULT: None, "one thread": 1, "all threads": available_cpus()}
    sessions = {
        side: open_session(artefact, threads=threads, device="cpu") for side, threads in sides.items()
    }
    compare(sessions)
    calls = {side: _token(session) for side, session in sessions.items()}
    turns = -(-tokens // TURN)
    for others in OTHERS:
        job.progress(f"{others} other processes: timing {tokens} tokens of each side")
        with computing(others):
            times = in_turns(calls, repeats=tokens, turns=turns, warmup=SETTLE, rest=False)
        for side, ms in times.items():
            yield Row(
                others=others,
                side=side,
                precision=job["precision"],
                mean=float(np.mean(ms)),
                median=float(np.median(ms)),
                p99=float(np.percentile(ms, 99)),
                repeats=len(ms),
            )


@contextlib.contextmanager
def computing(others: int) -> Iterator[None]:
    """Other processes that compute while the body runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        time.sleep(STARTED)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _token(session: Session) -> Callable[[], Any]:
    """One token after another of one stream."""
    memory = session.start(1)
    token = np.zeros((1, 1), np.int64)
    return lambda: session.predict(token, memory)


def compare(sessions: Mapping[str, Session]) -> None:
    """Raises ArtefactError if the sides do not give the same answers."""
    tokens = np.random.default_rng(0).integers(0, 256, (1, 24))
    answers = {side: fed(session, tokens)[0] for side, session in sessions.items()}
    for side, answer in answers.items():
        difference = float(np.abs(answer - answers[DEFAULT]).max())
        agreed(difference, TOLERANCE, f"the side with {side} differs from the default")


def _against_the_better(name: str) -> Cell:
    """Cells with a time of the default divided by the better of one thread and all threads."""

    def cell(row: Figures, measured: Run) -> str:
        fixed = [
            other[name]
            for other in measured.rows
            if other["others"] == row["others"] and other["side"] != DEFAULT
        ]
        return number(row[name] / min(fixed))

    return cell


def _notes(lines: Sequence[Line]) -> list[str]:
    return [
        "Wall-clock time of one token with the default number of threads. Sessions were opened on the idle "
        "machine. *Of the better* divides by the better of one thread and all threads in the same state."
    ]


CASE = Case(
    name="busy",
    run=run,
    keys=("others", "side", "precision"),
    columns=(
        Column("size", lambda row, run: run.document["config"]),
        Column("other processes", "others"),
        Column("mean, ms", "mean"),
        Column("median, ms", "median"),
        Column("p99, ms", "p99"),
        Column("mean of the better", _against_the_better("mean")),
        Column("p99 of the better", _against_the_better("p99")),
    ),
    notes=_notes,
    summarized=lambda lines: [line for line in lines if line.row["side"] == DEFAULT],
    options=(
        "config",
        "repeats",
        option("--precision", "The precision of the weights.", default="int8-stored", show_default=True),
    ),
    published=lambda history: [history.newest("busy", size) for size in ("tales", "enwik8-base")],
)
