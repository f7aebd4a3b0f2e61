"""Times two or more sides fairly, and measures the limits of the machine that hold for all of them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
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
class TimesReading:
    """How many times as long calls took as reading as many bytes, at the memory's rate next to each call."""

    #: The median over all calls, and the 10th and 90th percentile.
    middle: float
    low: float
    high: float
    #: The median of the rates, in GB per second.
    gigabytes: float

    @classmethod
    def of(cls, milliseconds: Sequence[float], rates: Sequence[float], num_bytes: float) -> TimesReading:
        """rates: of the memory beside each call, in bytes per second."""
        ratios = [ms / (num_bytes / rate * 1e3) for ms, rate in zip(milliseconds, rates, strict=True)]
        low, high = np.percentile(ratios, (10, 90))
        return cls(middle=median(ratios), low=float(low), high=float(high), gigabytes=median(rates) / 1e9)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call: the median, and the fastest and slowest of the timed calls."""

    median: float
    fastest: float
    slowest: float
    repeats: int
    #: The same beside the memory's rate, where the bytes that a call must read are known.
    reading: TimesReading | None = None

    @classmethod
    def of(cls, milliseconds: Sequence[float], reading: TimesReading | None = None) -> Timing:
        """The timing of calls that took so long."""
        return cls(
            median=median(milliseconds),
            fastest=min(milliseconds),
            slowest=max(milliseconds),
            repeats=len(milliseconds),
            reading=reading,
        )

    def per(self, tokens: int) -> Timing:
        """The same timing per token, where a call computes this many tokens."""
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

    def read_milliseconds(self, num_bytes: float) -> float:
        return num_bytes / self.read_bytes * 1e3

    def compute_milliseconds(self, multiply_adds: float) -> float:
        return multiply_adds / self.multiply_adds * 1e3


class Reader:
    """Reads one large buffer with some threads; a call returns the bytes per second of that moment.

    num_bytes: of the buffer; by default it is twice as large as the caches, so that they hold none of it when
    it is read again.
    """

    def __init__(self, threads: int, num_bytes: int | None = None) -> None:
        num_bytes = num_bytes or max(READ_BYTES, 2 * cache_bytes())
        self._parts = np.array_split(np.ones(num_bytes // 8, np.int64), threads)
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> float:
        num_bytes: int = sum(part.nbytes for part in self._parts)
        (duration,) = milliseconds(lambda: list(self._pool.map(np.sum, self._parts)), repeats=1, warmup=0)
        return num_bytes / duration * 1e3

    def beside(self, calls: Iterable[Callable[[], Any]]) -> tuple[list[float], list[float]]:
        """The milliseconds of each call, and the mean of the memory's rates before and after it.

        The memory is read between every two calls, because its rate moves by half within minutes on machines
        that share it. So the caches hold nothing of the call before.
        """
        durations = []
        rates = [self()]
        for call in calls:
            durations += milliseconds(call, repeats=1, warmup=0)
            time.sleep(REST)
            rates.append(self())
        return durations, [(before + after) / 2 for before, after in itertools.pairwise(rates)]

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The milliseconds of each call of a side, and the memory's rate next to each, if that was read."""

    milliseconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def in_turns(
    sides: Mapping[Side, Callable[[], Any]],
    *,
    repeats: int,
    turns: int,
    warmup: int,
    rest: bool = True,
    clock: Callable[[], float] | None = None,
    reader: Reader | None = None,
    read: Collection[str] = (),
) -> dict[Side, Samples]:
    """`repeats` calls of every side, in turns, so that a machine that slows down slows all sides.

    Each turn begins with a rest, in which the threads of the side before go to sleep, and with untimed calls,
    which fill the caches again. clock: in seconds; of the wall by default. reader: measures the memory's rate
    next to each call of the sides in `read`.
    """
    found: dict[Side, Samples] = {name: Samples() for name in sides}
    for turn in range(turns):
        share = repeats * (turn + 1) // turns - repeats * turn // turns
        for name, call in sides.items():
            if not share:
                continue
            time.sleep(REST if rest and len(sides) > 1 else 0)
            if reader is None or name not in read:
                found[name].milliseconds.extend(milliseconds(call, repeats=share, warmup=warmup, clock=clock))
                continue
            milliseconds(call, repeats=0, warmup=warmup)
            durations, rates = reader.beside([call] * share)
            found[name].milliseconds.extend(durations)
            found[name].rates.extend(rates)
    return found


def take_turns(
    sides: Mapping[Side, Callable[[], Any]],
    *,
    repeats: int,
    warmup: int = 2,
    turns: int = 3,
    rest: bool = True,
    clock: Callable[[], float] | None = None,
    num_bytes: Mapping[Side, int] = MappingProxyType({}),
    threads: int = 1,
) -> dict[Side, Timing]:
    """A timing of every side, measured as in `in_turns`.

    num_bytes: of some sides, what a call must read; these are timed next to the memory's rate for this many
    threads.
    """
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(contextlib.closing(Reader(threads))) if num_bytes else None
        found = in_turns(
            sides,
            repeats=repeats,
            turns=turns,
            warmup=warmup,
            rest=rest,
            clock=clock,
            reader=reader,
            read=num_bytes.keys(),
        )
    return {
        name: Timing.of(
            each.milliseconds,
            TimesReading.of(each.milliseconds, each.rates, num_bytes[name]) if name in num_bytes else None,
        )
        for name, each in found.items()
    }


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
    """Bytes per second that the threads read together, each from its own part of one large buffer."""
    with contextlib.closing(Reader(threads)) as reader:
        reader(), reader()
        return max(reader() for _ in range(8))


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
