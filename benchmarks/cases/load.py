"""From opening to the first token, and the memory that stays taken: an artefact against its run in PyTorch.

Each repeat is a new process. The files are in the page cache, as on a machine that has opened them before.
Opening verifies the hash of every file on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import Case, Column, Job, megabytes
from benchmarks.measure import Timing
from benchmarks.models import random_artefact, random_run
from runtimes.contract.spec import WEIGHTS

ROOT = Path(__file__).parents[2]
OPENINGS = 5  # of each side; every one starts a process
# Prints seconds and bytes of opening a folder. The memory comes from Linux, and is null on other systems.
# It is no module, because importing `benchmarks` would import what is to be measured.
PROGRAM = """
import json, sys, time
from pathlib import Path
threads, path = int(sys.argv[1]), Path(sys.argv[2])
began = time.perf_counter()
import numpy as np
import runtimes
__import__("onnxruntime" if (path / "spec.json").is_file() else "trainer.run.checkpoint")
imported = time.perf_counter()
session = runtimes.open_session(path, threads=threads, device="cpu")
opened = time.perf_counter()
memory = session.start(1)
session.predict(np.zeros((1, 1), np.int64), memory)
ready = time.perf_counter()
status = Path("/proc/self/status")
fields = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.is_file() else {}
print(json.dumps({
    "imports": imported - began,
    "open": opened - imported,
    "first_token": ready - opened,
    "memory_bytes": sum(array.nbytes for array in memory.tensors.values()),
    "resident_bytes": int(fields["VmRSS"].split()[0]) * 1024 if fields else None,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Row:
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
            command = [sys.executable, "-c", PROGRAM, str(job.threads), str(folder)]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            reports[side].append(json.loads(done.stdout))
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
    run=run,
    keys=("side",),
    columns=(
        Column("side", "side"),
        Column("imports, ms", "imports"),
        Column("opening, ms", "open"),
        Column("first token, ms", "token"),
        Column("resident MB", "resident_bytes", megabytes),
        Column("weights and memory, MB", "needed_bytes", megabytes),
    ),
    options=("config", "repeats"),
    published=lambda history: [history.newest("load", "enwik8-large")],
)
