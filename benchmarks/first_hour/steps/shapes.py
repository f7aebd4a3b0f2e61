"""Ten thousand steps of changing shapes, with the device memory watched: does anything leak?

TensorRT leaks a CUDA module at every change of shape of an ahead-of-time plugin (NVIDIA/TensorRT#4849).
"""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.engines import MOST_ROWS, options_of
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes import Session, check, open_session
from runtimes.contract.engine import Attention
from runtimes.sessions.tensorrt.device_memory import Cuda
from xl_export.tensorrt.build import build

STEPS, QUICK_STEPS = 10_000, 60
SAMPLES = 40  # readings of the device memory
WARM_UP = 0.2  # share of the steps in which every shape occurs, and caches may grow
MOST_MIB = 8.0  # of growth after the warm-up; other programs of the machine move it a little


def run(record: Record, *, what: str) -> None:
    """Keeps the device memory over the steps, its growth after the warm-up, and whether scores stay finite.

    what: `native` or `plugin` for an engine of TensorRT, `cuda` for ONNX Runtime's provider.
    """
    config = config_of("small", quick=record.quick)
    folder, device = _model(record, what)
    session = open_session(folder, device=device)
    steps = QUICK_STEPS if record.quick else STEPS
    samples, finite = feed(session, steps, segment=config.segment)
    used = [(samples[0] - free) / 2**20 for free in samples]
    record.series("device memory in use, MiB more than before", used)
    grown = growth(used)
    each = grown / ((1 - WARM_UP) * steps) * 1e3
    record.check(
        "device memory stays",
        grown <= MOST_MIB,
        f"{steps:,} steps in segments of 1 to {config.segment} tokens and 1 to {MOST_ROWS} rows: "
        f"{grown:.1f} MiB more after the warm-up, {each:.2f} MiB for 1,000 steps (at most {MOST_MIB:g} MiB)",
    )
    record.check("scores are finite", finite, "every score is a number" if finite else "some are not")
    with record.attempt("check afterwards"):
        report = check(folder, device=device)
        record.check("check afterwards", report.passed, report.sentence)


def feed(session: Session, steps: int, *, segment: int) -> tuple[list[int], bool]:
    """The free bytes of the device before, during and after the steps, and whether all scores were finite."""
    draw = np.random.default_rng(0)
    memories = {batch: session.start(batch) for batch in range(1, MOST_ROWS + 1)}
    samples, finite = [free_bytes()], True
    for number in range(steps):
        batch, tokens = int(draw.integers(1, MOST_ROWS + 1)), int(draw.integers(1, segment + 1))
        text = draw.integers(0, session.vocab.size, (batch, tokens + 1))
        scores, memories[batch] = session.score(text[:, :-1], text[:, 1:], memories[batch])
        finite = finite and bool(np.isfinite(scores).all())
        if (number + 1) % max(1, steps // SAMPLES) == 0:
            samples.append(free_bytes())
    return samples, finite


def growth(used: list[float]) -> float:
    """How much more is in use at the end than after the warm-up."""
    return used[-1] - used[max(1, int(WARM_UP * (len(used) - 1)))]


def free_bytes() -> int:
    """The free memory of the GPU, of all programs together."""
    try:
        cuda = import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NotHereError("cuda-bindings is not installed; run `pip install cuda-bindings`.") from error
    problem, free, _ = cuda.cudaMemGetInfo()
    if problem != cuda.cudaError_t.cudaSuccess:
        raise NotHereError(f"the device memory cannot be read ({problem.name}); update the driver.")
    return int(free)


def _model(record: Record, what: str) -> tuple[Path, str]:
    """The folder to open, and the device that computes it."""
    config = config_of("small", quick=record.quick)
    if what == "cuda":
        kind = Kind(target="onnxruntime", form="ring", precision="fp32")
        return artefact_of(record, config, kind), "cuda"
    attention: Attention = "plugin" if what == "plugin" else "native"
    kind = Kind(target="tensorrt", form="ring", precision="fp16")
    artefact = artefact_of(record, config, kind)
    out = artefact.with_name(f"engine-shapes-{what}")
    shutil.rmtree(out, ignore_errors=True)
    build(artefact, out, options_of("tensorrt", attention, Cuda().gpu.compute_capability))
    return out, "tensorrt"
