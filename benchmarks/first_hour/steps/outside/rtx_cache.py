"""What TensorRT-RTX compiles in one process is kept for the next one, which then opens the engine sooner.

Each of the two is a process `python -m benchmarks.first_hour.steps.outside.rtx_cache ENGINE`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps.engines import keep_build, options_of
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes import open_session
from runtimes.sessions.tensorrt.device_memory import Cuda
from runtimes.sessions.tensorrt.module import load_tensorrt
from runtimes.sessions.tensorrt.runtime_cache import VARIABLE
from xl_export.tensorrt.build import build

KIND = Kind(target="tensorrt", form="ring", precision="fp16")
PROCESSES = ("the first process", "the second process")
TOLERANCE = 1e-3  # nats; kernels for other shapes may be compiled later, and add in another order
ANSWERED = "answered: "  # stands before the JSON of a process, among what libraries print


def run(record: Record) -> None:
    """Keeps what each process took, whether the cache is a file after it, and whether they answer alike."""
    load_tensorrt("rtx")  # a package that is missing is the result of the whole step
    artefact = artefact_of(record, config_of("small", quick=record.quick), KIND)
    out = artefact.with_name("engine-for-the-cache")
    shutil.rmtree(out, ignore_errors=True)
    keep_build(
        record, "rtx", build(artefact, out, options_of("rtx", "native", Cuda().gpu.compute_capability))
    )
    answers = []
    # A session refuses a cache where others may write, and the folder of the report may be such a place.
    with tempfile.TemporaryDirectory() as cache:
        for name in PROCESSES:
            found = in_a_process(out, Path(cache))
            answers.append(np.array(found["log_probs"]))
            record.fact(f"{name}: opened and answered", f"after {found['seconds']:.2f} s")
            kept = [path.stat().st_size for path in Path(cache).iterdir()]
            said = f"{len(kept)} files, {sum(kept) / 2**20:.2f} MiB"
            record.check(f"the cache after {name}", len(kept) == 1 and kept[0] > 0, said)
    worst = float(np.abs(answers[0] - answers[1]).max())
    said = f"at most {worst:.2e} nats apart (tolerance {TOLERANCE:g})"
    record.check("the answers of both processes", worst <= TOLERANCE, said)


def in_a_process(engine: Path, cache: Path) -> dict[str, Any]:
    """What `answered` returns in a process of its own, which keeps in `cache` what it compiles."""
    command = [sys.executable, "-m", "benchmarks.first_hour.steps.outside.rtx_cache", str(engine)]
    environment = {**os.environ, VARIABLE: str(cache)}
    ended = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(ended.stdout, flush=True)
    found = [line for line in ended.stdout.splitlines() if line.startswith(ANSWERED)]
    if ended.returncode or not found:
        last = (ended.stdout.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"the process ended with exit code {ended.returncode}: {last:.300}")
    document: dict[str, Any] = json.loads(found[-1].removeprefix(ANSWERED))
    return document


def answered(engine: Path) -> dict[str, Any]:
    """The log-probabilities of a segment and of single tokens, and the seconds since it began to open."""
    began = time.perf_counter()
    session = open_session(engine)
    T = session.rule.segment
    tokens = np.random.default_rng(0).integers(0, session.vocab.size, (1, T + 4))
    memory, pieces, at = session.start(1), [], 0
    for length in (T, 1, 1, 1):
        piece = tokens[:, at : at + length], tokens[:, at + 1 : at + length + 1]
        log_probs, memory = session.score(*piece, memory)
        pieces += log_probs.ravel().tolist()
        at += length
    return {"seconds": time.perf_counter() - began, "log_probs": pieces}


if __name__ == "__main__":
    print(ANSWERED + json.dumps(answered(Path(sys.argv[1]))), flush=True)
