"""What a GPU can do at best, measured with its own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

COPIED_BYTES = 1 << 30  # bytes; far more than the caches of any GPU
MATRIX_SIDE = 8192  # of the square matrices
LAUNCHES = 200


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The best of several measurements."""

    copy: float  # bytes per second, read and written
    halves: float  # multiply-adds per second of a large fp16 product
    singles: float  # the same in fp32, without TF32
    launch: float  # microseconds of a tiny kernel in a CUDA graph

    def reading(self, num_bytes: float) -> float:
        """The least milliseconds in which these bytes are read or written."""
        return num_bytes / self.copy * 1e3

    def computing(self, multiply_adds: float, *, halves: bool) -> float:
        """The least milliseconds of these multiply-adds."""
        return multiply_adds / (self.halves if halves else self.singles) * 1e3


def measure_rates() -> Rates:
    """The rates of this machine's GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * COPIED_BYTES / min(seconds(lambda: target.copy_(source)))
    products = []
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device="cuda", dtype=dtype)
        products.append(MATRIX_SIDE**3 / min(seconds(lambda x=x: x @ x)))  # type: ignore[misc]
    return Rates(copy=copy, halves=products[0], singles=products[1], launch=_launch())


def captured(call: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `launches` calls."""
    call()  # what is made at the first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph


def seconds(call: Callable[[], object], *, repeats: int = 10) -> list[float]:
    """Seconds of each call by the GPU's own clock, after three untimed ones."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found


def _launch() -> float:
    x = torch.zeros(32, device="cuda")
    graph = captured(lambda: x.add_(1), LAUNCHES)
    return min(seconds(graph.replay)) / LAUNCHES * 1e6
