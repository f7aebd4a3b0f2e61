"""Attention alone at several shapes: the project's kernels, PyTorch, compiled PyTorch and FlexAttention."""

from __future__ import annotations

import importlib.util
from statistics import median

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.limits import torch_seconds
from benchmarks.measure import Timing

QUICK_SHAPES = 1
REPEATS = 30


def run(record: Record) -> None:
    """Compares every side with float64, and times those that are right."""
    import torch

    if importlib.util.find_spec("triton") is None:
        raise NotHereError("triton is not installed; run `pip install 'xl-export[tensorrt]'`.")
    if not torch.cuda.is_available():
        raise NotHereError("PyTorch sees no GPU; install its CUDA build.")
    from benchmarks.cases.on_gpu import triton_kernel as case

    for shape in case.SHAPES[: QUICK_SHAPES if record.quick else None]:
        name = f"H {shape.H} K {shape.K} M {shape.M}"
        with record.attempt(name):
            tensors = case.inputs(shape, device="cuda", dtype=torch.float16)
            reference = case.eager(*(x.double() for x in (*tensors[:3], *tensors[4:7])))
            sides = case.sides(tensors)
        for side, call in sides.items():
            label = f"{side}, B {shape.B} T {shape.T} {name}"
            with record.attempt(label):
                difference = float((call() - reference).abs().max())
                right = difference <= case.TOLERANCE
                said = f"differs from float64 by at most {difference:.2e} (tolerance {case.TOLERANCE:g})"
                record.check(label, right, said)
                if right:
                    ms = [each * 1e3 for each in torch_seconds(call, repeats=REPEATS)]
                    record.time(
                        Timing(median=median(ms), fastest=min(ms), slowest=max(ms), repeats=len(ms)),
                        model=f"attention, {name}",
                        side=side,
                        batch=shape.B,
                        tokens=shape.T,
                        num_bytes=shape.num_bytes,
                        multiply_adds=shape.multiply_adds,
                    )
