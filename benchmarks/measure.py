"""Times two or more sides fairly, and measures the limits of the machine that hold for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from benchmarks.checked_sessions import open_graph
from runtimes.contract.tensors import TensorFacts
from xl_export.graph.ops import Ops, graph_input

READ_BYTES = 512 << 20  # much larger than any cache
MATRIX = 2048
REST = 0.3  # seconds before another side is timed, since the idle threads of an engine spin for a while
Side = TypeVar("Side", bound=str)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call: the median, and the fastest and slowest of the timed calls."""

    median: float
    fastest: float
    slowest: float
    repeats: int

    def per(self, tokens: int) -> Timing:
        """The same timing per token, where a call computes this many tokens."""
        return Timing(
            median=self.median / tokens,
            fastest=self.fastest / tokens,
            slowest=self.slowest / tokens,
            repeats=self.repeats,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine can do at best per second: bytes read from memory, and fp32 multiply-adds."""

    read_bytes: float
    multiply_adds: float

    def read_milliseconds(self, num_bytes: float) -> float:
        return num_bytes / self.read_bytes * 1e3

    def compute_milliseconds(self, multiply_adds: float) -> float:
        return multiply_adds / self.multiply_adds * 1e3


def take_turns(
    sides: Mapping[Side, Callable[[], Any]], *, repeats: int, warmup: int = 2, turns: int = 3
) -> dict[Side, Timing]:
    """A timing of `repeats` calls of every side, in turns, so that a machine that slows down slows all sides.

    Each turn begins with a rest, in which the threads of the side before go to sleep, and with untimed calls,
    which fill the caches again.
    """
    times: dict[Side, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        share = repeats * (turn + 1) // turns - repeats * turn // turns
        for name, call in sides.items():
            if share:
                time.sleep(REST if len(sides) > 1 else 0)
                times[name] += milliseconds(call, repeats=share, warmup=warmup)
    return {
        n: Timing(median=median(ms), fastest=min(ms), slowest=max(ms), repeats=len(ms))
        for n, ms in times.items()
    }


def median_milliseconds(call: Callable[[], Any], *, repeats: int, warmup: int = 2) -> float:
    """The median duration of a call."""
    return median(milliseconds(call, repeats=repeats, warmup=warmup))


def milliseconds(call: Callable[[], Any], *, repeats: int, warmup: int = 2) -> list[float]:
    """Durations of `repeats` calls, after `warmup` untimed ones."""
    for _ in range(warmup):
        call()
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        durations.append((time.perf_counter() - began) * 1e3)
    return durations


def measure_limits(threads: int) -> Limits:
    """Both limits with this many threads, each the best of several measurements; takes about two seconds."""
    return Limits(read_bytes=_read_rate(threads), multiply_adds=_matrix_rate(threads))


def _read_rate(threads: int) -> float:
    """Bytes per second that the threads read together, each from its own part of one large buffer."""
    parts = np.array_split(np.ones(READ_BYTES // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        best = min(milliseconds(lambda: list(pool.map(np.sum, parts)), repeats=8))
    return READ_BYTES / best * 1e3


def _matrix_rate(threads: int) -> float:
    """Multiply-adds per second of a large square matrix product in ONNX Runtime, one side constant."""
    op, shape = Ops(), (str(MATRIX), str(MATRIX))
    facts = [TensorFacts(name=name, dtype="float32", shape=shape) for name in ("x", "y")]
    x = graph_input(facts[0])
    ones = np.ones((MATRIX, MATRIX), np.float32)
    model = op.model([x], [op.MatMul(x, op.constant(ones))], (facts[1],), opset=23)
    session = open_graph(ir.to_proto(model).SerializeToString(), threads=threads)
    return MATRIX**3 / min(milliseconds(lambda: session.run(None, {"x": ones}), repeats=8)) * 1e3
