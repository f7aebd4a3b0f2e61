"""What the GPU can do at best: a large copy, large products, and launches of almost nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.first_hour.rates import COPY, HALVES, SINGLES
from benchmarks.first_hour.record import NotHereError, Record

COPIED, QUICK_COPIED = 1 << 30, 1 << 22  # bytes; far more than any cache of a GPU
SIDE, QUICK_SIDE = 8192, 256
REPEATS, LAUNCHES = 10, 200


def run(record: Record) -> None:
    """Keeps each rate as a series of all its measurements."""
    with record.attempt("copy on the device"):
        rates = copy_rates(QUICK_COPIED if record.quick else COPIED)
        record.series(COPY, rates)
        record.check("copy on the device", True, f"{max(rates) / 1e9:.0f} GB/s, read and written")
    try:
        import torch
    except ImportError:
        record.fact("products", "not measured, since PyTorch is not installed")
        return
    if not torch.cuda.is_available():
        record.fact("products", f"not measured, since PyTorch {torch.__version__} sees no GPU")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    side = QUICK_SIDE if record.quick else SIDE
    for name, dtype in ((HALVES, torch.float16), (SINGLES, torch.float32)):
        with record.attempt(name):
            x = torch.randn(side, side, device="cuda", dtype=dtype)
            seconds = torch_seconds(functools.partial(torch.matmul, x, x))
            record.series(name, [side**3 / each for each in seconds])
            record.check(name, True, f"{side**3 / min(seconds) / 1e12:.1f} T multiply-adds/s")
    with record.attempt("launches in a CUDA graph"):
        record.series("microseconds for a kernel in a CUDA graph", [each * 1e6 for each in launch_seconds()])


def copy_rates(num_bytes: int) -> list[float]:
    """Bytes per second, read and written together, of copies on the device; PyTorch is not needed."""
    try:
        cuda = import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NotHereError("cuda-bindings is not installed; run `pip install cuda-bindings`.") from error

    def ask(answer: tuple[Any, ...]) -> Any:
        problem, *values = answer
        if problem != cuda.cudaError_t.cudaSuccess:
            raise MemoryError(str(problem.name)) if "Alloc" in problem.name else OSError(str(problem.name))
        return values[0] if values else None

    source, target = (ask(cuda.cudaMalloc(num_bytes)) for _ in range(2))
    start, end = (ask(cuda.cudaEventCreate()) for _ in range(2))
    kind, rates = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice, []
    for _ in range(REPEATS + 1):
        ask(cuda.cudaEventRecord(start, 0))
        ask(cuda.cudaMemcpyAsync(target, source, num_bytes, kind, 0))
        ask(cuda.cudaEventRecord(end, 0))
        ask(cuda.cudaEventSynchronize(end))
        rates.append(2 * num_bytes / (ask(cuda.cudaEventElapsedTime(start, end)) / 1e3))
    for address in (source, target):
        ask(cuda.cudaFree(address))
    return rates[1:]  # the first copy is slower


def torch_seconds(call: Callable[[], object], *, repeats: int = REPEATS) -> list[float]:
    """Seconds of each call on the GPU, by its own clock, after three untimed ones."""
    import torch

    for _ in range(3):
        call()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def launch_seconds() -> list[float]:
    """Seconds for one of many tiny kernels that a CUDA graph launches one after the other."""
    import torch

    x = torch.zeros(32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            x.add_(1)
    return [each / LAUNCHES for each in torch_seconds(graph.replay)]
