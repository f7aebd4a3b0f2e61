"""Opening or exporting once in a new process, which shows the seconds and the memory of this work alone.

`python -m benchmarks.child WHAT ARGUMENT…` prints one line of JSON. The memory comes from /proc of Linux, and
is null on other systems.
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
    """The report of a new process about `open` or `export`; raises ArtefactError where the process fails."""
    command = [sys.executable, "-m", "benchmarks.child", what, str(threads), *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ArtefactError(
            f"{what} failed in a new process ({lines[-1] if lines else done.returncode}); please report this."
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
        **_resident(),
    }


def measure_export(threads: int, run: str, out: str, form: str) -> dict[str, Any]:
    """Seconds of an export, which includes the comparison with PyTorch; bytes of the process after it."""
    import torch

    import xl_export

    torch.set_num_threads(threads)
    began = time.perf_counter()
    xl_export.export(run, out, memory=form)
    return {"seconds": time.perf_counter() - began, **_resident()}


def _resident() -> dict[str, int | None]:
    """resident_bytes of now, and peak_bytes (VmHWM, since ru_maxrss includes the parent process)."""
    if not STATUS.is_file():
        return {"resident_bytes": None, "peak_bytes": None}
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (("resident_bytes", "VmRSS"), ("peak_bytes", "VmHWM"))
    }


def main(arguments: Sequence[object]) -> str:
    """The report of WHAT, the number of threads, and further arguments, as one line of JSON."""
    what, threads, *others = map(str, arguments)
    report = measure_open if what == "open" else measure_export
    return json.dumps(report(int(threads), *others))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
