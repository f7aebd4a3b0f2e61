"""Opening once in a new process, which shows the seconds and the memory of this work alone.

The process runs this file as a program, which prints one line of JSON. The memory comes from /proc of Linux,
and is null on other systems.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def open_in_child(path: Path, *, threads: int) -> dict[str, Any]:
    """The report of a new process; raises ArtefactError if the process fails."""
    from runtimes.base.errors import ArtefactError

    # Not as a module: importing `benchmarks` would import what is to be measured.
    command = [sys.executable, "-c", Path(__file__).read_text("utf-8"), str(threads), str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ArtefactError(
            f"{path} could not be opened in a new process ({lines[-1] if lines else done.returncode}); "
            "please report this."
        )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def measure_open(threads: int, path: str) -> dict[str, Any]:
    """Seconds of importing packages, opening an artefact or run, and one token; bytes of the process then."""
    began = time.perf_counter()
    import numpy as np

    import runtimes

    engine = "onnxruntime" if (Path(path) / "spec.json").is_file() else "trainer.run.checkpoint"
    __import__(engine)
    imported = time.perf_counter()
    session = runtimes.open_session(path, threads=threads, device="cpu")
    opened = time.perf_counter()
    memory = session.start(1)
    session.predict(np.zeros((1, 1), np.int64), memory)
    ready = time.perf_counter()
    return {
        "imports": imported - began,
        "open": opened - imported,
        "first_token": ready - opened,
        "memory_bytes": sum(array.nbytes for array in memory.tensors.values()),
        "resident_bytes": _resident(),
    }


def _resident() -> int | None:
    """Bytes of this process now."""
    if not STATUS.is_file():
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure_open(int(sys.argv[1]), sys.argv[2])))
