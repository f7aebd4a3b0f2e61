"""Times two or more sides fairly, and measures the limits of the machine that hold for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from benchmarks.checked_sessions import open_graph
from benchmarks.machine import cache_bytes
from runtimes.contract.tensors import TensorSpec
from xl_export.graph.ops import Ops, graph_input

READ_BYTES = 512 << 20  # what is read at least to measure the memory's rate
MATRIX = 2048
REST = 0.3  # seconds before anything else is timed, since the idle threads of an engine spin for a while
Side = TypeVar("Side", bound=str)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call: the median, and the fastest and slowest of the timed calls."""

    median: float
    fastest: float
    slowest: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """The timing of calls that took so long."""
        return cls(
            median=median(milliseconds),
            fastest=min(milliseconds),
            slowest=max(milliseconds),
            repeats=len(milliseconds),
        )

    def per(self, tokens: int) -> Timing:
        """The same timing per token, if a call computes this many tokens."""
        return replace(
            self,
            median=self.median / tokens,
            fastest=self.fastest / tokens,
            slowest=self.slowest / tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine can do at best per second: bytes read from memory, and fp32 multiply-adds."""

    read_bytes: float
    multiply_adds: float


def in_turns(
    sides: Mapping[Side, Callable[[], Any]],
    *,
    repeats: int,
    turns: int,
    warmup: int,
    rest: bool = True,
    clock: Callable[[], float] | None = None,
) -> dict[Side, list[float]]:
    """Milliseconds of `repeats` calls of every side, in turns, so that a machine that slows down slows all.

    Each turn begins with a rest, in which the threads of the side before go to sleep, and with untimed calls,
    which fill the caches again. clock: in seconds; of the wall by default.
    """
    found: dict[Side, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        share = repeats * (turn + 1) // turns - repeats * turn // turns
        for name, call in sides.items():
            if share:
                time.sleep(REST if rest and len(sides) > 1 else 0)
                found[name] += milliseconds(call, repeats=share, warmup=warmup, clock=clock)
    return found


def take_turns(
    sides: Mapping[Side, Callable[[], Any]],
    *,
    repeats: int,
    warmup: int = 2,
    turns: int = 3,
    rest: bool = True,
    clock: Callable[[], float] | None = None,
) -> dict[Side, Timing]:
    """A timing of every side, measured as in `in_turns`."""
    found = in_turns(sides, repeats=repeats, turns=turns, warmup=warmup, rest=rest, clock=clock)
    return {name: Timing.of(times) for name, times in found.items()}


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


def measure_limits(threads: int) -> Limits:
    """Both limits with this many threads, each the best of several measurements; takes about two seconds."""
    return Limits(read_bytes=_read_rate(threads), multiply_adds=_matrix_rate(threads))


def _read_rate(threads: int) -> float:
    """Bytes per second that the threads read together, each from its own part of one large buffer.

    The buffer is twice as large as the caches, so that they hold none of it when it is read again.
    """
    buffer = np.ones(max(READ_BYTES, 2 * cache_bytes()) // 8, np.int64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = milliseconds(lambda: list(pool.map(np.sum, parts)), repeats=8)
    num_bytes: int = buffer.nbytes
    return num_bytes / min(times) * 1e3


def _matrix_rate(threads: int) -> float:
    """Multiply-adds per second of a large square matrix product in ONNX Runtime, one side constant."""
    op = Ops()
    shape = (MATRIX, MATRIX)
    facts = [TensorSpec(name=name, dtype="float32", shape=shape) for name in ("x", "y")]
    x = graph_input(facts[0])
    ones = np.ones((MATRIX, MATRIX), np.float32)
    model = op.model([x], [op.MatMul(x, op.constant(ones))], (facts[1],), opset=23)
    session = open_graph(ir.to_proto(model).SerializeToString(), threads=threads)
    return MATRIX**3 / min(milliseconds(lambda: session.run(None, {"x": ones}), repeats=8)) * 1e3
