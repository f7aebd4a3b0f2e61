"""Something done once in a process of its own, which alone tells what it costs: seconds, and memory of that process.

`python -m benchmarks.child WHAT ARGUMENT…` prints one line of JSON. Memory is that of Linux's /proc; null elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError

STATUS = Path("/proc/self/status")


def in_child(what: str, *arguments: object, threads: int) -> dict[str, Any]:
    """What a new process reports of `open` or `export`; raises ArtefactError with its last line where it fails."""
    command = [sys.executable, "-m", "benchmarks.child", what, str(threads), *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ArtefactError(
            f"{what} failed in a process of its own ({lines[-1] if lines else done.returncode}); please report this."
        )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def measure_open(threads: int, path: str) -> dict[str, Any]:
    """Opens an artefact or run and computes one token with empty memory. imports: seconds before, for packages."""
    began = time.perf_counter()
    import numpy as np

    import runtimes

    engine = "onnxruntime" if (Path(path) / "spec.json").is_file() else "trainer.run.checkpoint"
    __import__(engine)
    imported = time.perf_counter()
    session = runtimes.open_session(path, threads=threads)
    opened = time.perf_counter()
    memory = session.start(1)
    session.predict(np.zeros((1, 1), np.int64), memory)
    ready = time.perf_counter()
    return {
        "imports": imported - began, "open": opened - imported, "first_token": ready - opened,
        "memory_bytes": sum(array.nbytes for array in memory.tensors.values()), **_resident(),
    }  # fmt: skip


def measure_export(threads: int, run: str, out: str, form: str) -> dict[str, Any]:
    """Exports a run, validation included."""
    import torch

    import xl_export

    torch.set_num_threads(threads)
    began = time.perf_counter()
    xl_export.export(run, out, memory=form)
    return {"seconds": time.perf_counter() - began, **_resident()}


def _resident() -> dict[str, int | None]:
    """resident_bytes now, and peak_bytes: the most so far (VmHWM; ru_maxrss would count the parent's)."""
    if not STATUS.is_file():
        return {"resident_bytes": None, "peak_bytes": None}
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    found = {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (("resident_bytes", "VmRSS"), ("peak_bytes", "VmHWM"))
    }
    return {**found}


def main(arguments: Sequence[object]) -> str:
    """The report of WHAT, the number of threads, and further arguments, as one line of JSON."""
    what, threads, *others = map(str, arguments)
    report = measure_open if what == "open" else measure_export
    return json.dumps(report(int(threads), *others))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
