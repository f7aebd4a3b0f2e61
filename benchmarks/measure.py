"""Times two or more sides fairly, and measures the limits of the machine that hold for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from benchmarks.checked_sessions import open_graph
from benchmarks.machine import cache_bytes
from runtimes.contract.tensors import TensorSpec
from xl_export.graph.ops import Ops, graph_input

READ_BYTES = 512 << 20  # smallest buffer that is read to measure the memory's rate
MATRIX_SIDE = 2048
REST_SECONDS = 0.3  # before each turn, since the idle threads of a library spin for a while
Timing = dict[str, Any]  # median, fastest and slowest call, and the number of repeats
Side = TypeVar("Side", bound=str)


def timing(values: Sequence[float], *, per: int = 1) -> Timing:
    """Median, fastest and slowest of some times. per: number of tokens that each of them computed."""
    scaled = [value / per for value in values]
    return {
        "median": median(scaled),
        "fastest": min(scaled),
        "slowest": max(scaled),
        "repeats": len(scaled),
    }


def take_turns(
    sides: Mapping[Side, Callable[[], Any]],
    *,
    repeats: int,
    turns: int = 3,
    warmup: int = 2,
    rest: bool = True,
    clock: Callable[[], float] | None = None,
) -> dict[Side, list[float]]:
    """Milliseconds of `repeats` calls of every side, in turns: a machine that slows down slows all sides.

    Each turn begins with a rest, in which the threads of the side before go to sleep, and with untimed calls,
    which fill the caches again. clock: in seconds; wall-clock time by default.
    """
    found: dict[Side, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        share = repeats * (turn + 1) // turns - repeats * turn // turns
        for name, call in sides.items():
            if share:
                time.sleep(REST_SECONDS if rest and len(sides) > 1 else 0)
                found[name] += milliseconds(call, repeats=share, warmup=warmup, clock=clock)
    return found


def milliseconds(
    call: Callable[[], Any], *, repeats: int, warmup: int = 2, clock: Callable[[], float] | None = None
) -> list[float]:
    """Durations of `repeats` calls, after `warmup` untimed ones."""
    clock = clock or time.perf_counter
    for _ in range(warmup):
        call()
    durations = []
    for _ in range(repeats):
        began = clock()
        call()
        durations.append((clock() - began) * 1e3)
    return durations


def measure_limits(threads: int) -> dict[str, float]:
    """Bytes per second that are read from memory, and fp32 multiply-adds per second; takes two seconds."""
    return {"read_bytes": _read_rate(threads), "multiply_adds": _matrix_rate(threads)}


def least_ms(limits: Mapping[str, float], num_bytes: float, multiply_adds: float) -> float:
    """Milliseconds that a step takes at least: it must read its bytes and compute its products."""
    return 1e3 * max(num_bytes / limits["read_bytes"], multiply_adds / limits["multiply_adds"])


def _read_rate(threads: int) -> float:
    """The best rate of threads that read one buffer together, each its own part.

    The buffer is twice as large as the caches, so they hold none of it when it is read again.
    """
    buffer = np.ones(max(READ_BYTES, 2 * cache_bytes()) // 8, np.int64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = milliseconds(lambda: list(pool.map(np.sum, parts)), repeats=8)
    num_bytes: int = buffer.nbytes
    return num_bytes / min(times) * 1e3


def _matrix_rate(threads: int) -> float:
    """The best rate of a large square matrix product in ONNX Runtime; one matrix is constant."""
    op = Ops()
    shape = (MATRIX_SIDE, MATRIX_SIDE)
    specs = [TensorSpec(name=name, dtype="float32", shape=shape) for name in ("x", "y")]
    x = graph_input(specs[0])
    ones = np.ones(shape, np.float32)
    model = op.model([x], [op.MatMul(x, op.constant(ones))], (specs[1],), opset=23)
    session = open_graph(ir.to_proto(model).SerializeToString(), threads=threads)
    return MATRIX_SIDE**3 / min(milliseconds(lambda: session.run(None, {"x": ones}), repeats=8)) * 1e3
