"""Attention alone at several shapes: the project's kernels, PyTorch, compiled PyTorch and FlexAttention."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.limits import torch_seconds
from benchmarks.measure import Timing

if TYPE_CHECKING:
    from benchmarks.cases.on_gpu.triton_kernel import (
        Shape,
    )  # it imports PyTorch, which a machine may not have

DEVICE = "cuda"
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
        with record.attempt(f"B {shape.B} T {shape.T} {name}"):
            _one_shape(record, shape, name)


def _one_shape(record: Record, shape: Shape, name: str) -> None:
    """A function of its own, so that what one shape has made can be neither timed nor kept for the next."""
    import torch

    from benchmarks.cases.on_gpu import triton_kernel as case

    tensors = case.inputs(shape, device=DEVICE, dtype=torch.float16)
    reference = case.eager(*(x.double() for x in (*tensors[:3], *tensors[4:7])))
    for side, call in case.sides(tensors).items():
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
