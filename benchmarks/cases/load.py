"""From opening to the first token, and the memory that stays in use: an artefact against its run in PyTorch.

Each repeat is a new process. The files are in the page cache, as on a machine that has opened them before.
Opening verifies the hash of every file on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Job, Row, megabytes
from benchmarks.measure import timing
from benchmarks.models import artefact_of, run_of
from runtimes.contract.spec import WEIGHTS

ROOT = Path(__file__).parents[2]
MOST_REPEATS = 5  # by default; each starts two processes
# Prints seconds and bytes of opening a folder. The resident memory comes from Linux, and is null elsewhere.
# It is not a module, because importing `benchmarks` would import what is to be measured.
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


def run(job: Job) -> Iterator[Row]:
    """A row of the artefact and a row of the run."""
    repeats = job.repeats(min(job.config.repeats, MOST_REPEATS))
    sides = {"artefact": artefact_of(job), "run in PyTorch": run_of(job)}
    weight_bytes = (sides["artefact"] / WEIGHTS).stat().st_size
    job.say(f"opening each side in {repeats} new processes")
    reports: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, folder in sides.items():
            command = [sys.executable, "-c", PROGRAM, str(job.threads), str(folder.resolve())]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            reports[side].append(json.loads(done.stdout))
    for side, found in reports.items():
        resident = [report["resident_bytes"] for report in found]
        yield {
            "side": side,
            **{
                f"{name}_ms": timing([report[name] * 1e3 for report in found])
                for name in ("imports", "open", "first_token")
            },
            "resident_bytes": None if None in resident else round(median(resident)),
            "needed_bytes": weight_bytes + found[0]["memory_bytes"],
        }


KEYS = ("side",)
COLUMNS = {
    "side": "side",
    "imports, ms": "imports_ms",
    "opening, ms": "open_ms",
    "first token, ms": "first_token_ms",
    "resident MB": megabytes("resident_bytes"),
    "weights and memory, MB": megabytes("needed_bytes"),
}
