"""TensorRT's attention kernel in Triton against other forms of the same attention on one GPU.

Our sides are the PTX that an engine embeds, launched by the CUDA driver without TensorRT. The others are
PyTorch as it is, compiled, and FlexAttention. Every side is compared with PyTorch in float64 before it is
timed, in a CUDA graph. The limits are the GPU's own, measured in the same run: the bytes that must be read
and written at its rate for a large copy, and the multiply-adds at its rate for a large float16 product.
Inputs that fit in the GPU's cache stay there, so their time may be below the limit by reading.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Column, Job
from benchmarks.cases.on_gpu.rates import gpu_timing, measure_rates
from benchmarks.configs import CONFIGS
from benchmarks.measure import Timing
from benchmarks.runs import Figures, Run
from runtimes.base.errors import first_line
from xl_export.tensorrt.kernels.compile import (
    JOINS,
    Tactic,
    tactics,
)
from xl_export.tensorrt.kernels.driver import Driver, run_embedded
from xl_export.tensorrt.operator import INPUTS, Attributes

TOLERANCE = 1e-2  # in float16, where answers are of the order of one
ATTRIBUTES = Attributes(full_mask=0, nearest=0, initial_masked=1, persistent=0)
DEVICE = "cuda"
REPEATS = 30
UNTIMED = 3
Call = Callable[[], Tensor]
Measured = Callable[[], tuple[Tensor, Callable[[], Timing]]]  # the answer, and a function that times it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one attention of a Transformer-XL whose memory is full, by their letters."""

    B: int
    H: int
    T: int
    M: int
    K: int

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read and written: queries, keys, values, position table and answers."""
        rows = 2 * self.B * self.T + 2 * self.B * (self.M + self.T) + self.M + 1
        return 2 * self.H * self.K * rows

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of contents, positions and values, for the M + 1 keys that each query sees."""
        return 3 * self.B * self.H * self.T * (self.M + 1) * self.K


SHAPES = (
    Shape(B=1, H=8, T=1, M=1600, K=64),
    Shape(B=32, H=8, T=1, M=1600, K=64),
    Shape(B=1, H=16, T=1, M=3800, K=128),
    Shape(B=1, H=8, T=128, M=1600, K=64),
    Shape(B=8, H=8, T=512, M=512, K=64),
    Shape(B=1, H=8, T=512, M=3800, K=64),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side at one shape."""

    shape: Shape
    side: str
    attention: Timing | None = None
    #: Milliseconds that the limits of the GPU allow.
    reading: float | None = None
    computing: float | None = None
    #: The name of the GPU.
    device: str = ""
    #: Why nothing was timed.
    problem: str = ""


def unavailable() -> str | None:
    """Why this case cannot be measured on this machine; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install '.[tensorrt]' on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU; install its CUDA build on a machine with one"
    return None


def run(job: Job) -> Iterator[Row]:
    """A row for every side at every shape, on this machine's GPU.

    A side that fails, or differs from float64 by more than the tolerance, is not timed; its row says why.
    """
    rates = measure_rates()
    for shape in SHAPES:
        job.progress(f"{shape}: comparing every side with PyTorch in float64, then timing it")
        for row in measure_shape(shape):
            if row.problem:
                job.progress(f"{row.side}: {row.problem}")
            reading = rates.reading(shape.num_bytes)
            computing = rates.computing(shape.multiply_adds, halves=True)
            yield dataclasses.replace(row, reading=reading, computing=computing)


def measure_shape(shape: Shape) -> Iterator[Row]:
    """A row for every side at one shape."""
    try:
        tensors = inputs(shape, device=DEVICE, dtype=torch.float16)
        # The reference is not the naive operator, which takes too much memory at these sizes.
        reference = eager(*(x.double() for x in (*tensors[:3], *tensors[4:7])))
        measured = {side: _timed(call) for side, call in sides(tensors).items()} | embedded(tensors)
    except Exception as error:  # libraries for GPUs raise errors of every kind
        yield Row(shape=shape, side="all", problem=f"{type(error).__name__}: {first_line(error)}")
        return
    for side, measure in measured.items():
        try:
            answer, timing = measure()
        except Exception as error:
            yield Row(shape=shape, side=side, problem=f"{type(error).__name__}: {first_line(error)}")
            continue
        difference = float((answer - reference).abs().max())
        if difference <= TOLERANCE:
            yield Row(shape=shape, side=side, attention=timing(), device=_name())
        else:
            problem = f"differs from float64 by {difference:.3g}, more than {TOLERANCE:g}"
            yield Row(shape=shape, side=side, problem=problem, device=_name())


def _timed(call: Call) -> Measured:
    """The answer of a call, and a function that times it."""
    return lambda: (call(), lambda: gpu_timing(call, repeats=REPEATS))


def _name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def embedded(tensors: Sequence[Tensor]) -> dict[str, Measured]:
    """The kernels of an engine: a side for each tactic."""
    arrays = dict(zip(INPUTS, (x.cpu().numpy() for x in tensors), strict=True))
    query = arrays["query"]

    def measured(tactic: Tactic) -> Measured:
        def measure() -> tuple[Tensor, Callable[[], Timing]]:
            join = JOINS[query.shape[2] > 1]
            repeats = REPEATS + UNTIMED
            got = run_embedded(Driver(), arrays, ATTRIBUTES, tactic=tactic, join=join, repeats=repeats)
            timing = Timing.of(got.milliseconds[UNTIMED:])
            return torch.from_numpy(got.answer).to(tensors[0].device), lambda: timing

        return measure

    return {f"PTX {tactic.block_t}x{tactic.block_j}": measured(tactic) for tactic in _tactics(query.shape)}


def inputs(shape: Shape, *, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random inputs of the operator; each stream is far beyond its beginning."""
    B = shape.B
    H = shape.H
    T = shape.T
    M = shape.M
    K = shape.K
    draw = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=draw, device=device) * scale).to(dtype)

    query = normal(B, H, T, K, scale=K**-0.5)
    key = normal(B, H, M + T, K)
    value = normal(B, H, M + T, K)
    first = torch.full((B,), 2 * M + T, dtype=torch.int32, device=device)
    u = normal(H, 1, K, scale=K**-0.5)
    v = normal(H, 1, K, scale=K**-0.5)
    nothing = torch.zeros(H, 1, K, device=device, dtype=dtype)
    bias = torch.zeros(1, 1, device=device, dtype=dtype)
    return [query, key, value, first, u, v, normal(H, M + 1, K), bias, nothing, nothing]


def sides(tensors: Sequence[Tensor]) -> dict[str, Call]:
    """PyTorch's forms of the attention as calls, by name."""
    query, key, value, _, u, v, table = tensors[:7]
    made: dict[str, Call] = {}
    compiled = {form.__name__: torch.compile(form, dynamic=False) for form in (eager, flex)}
    made["eager"] = lambda: eager(query, key, value, u, v, table)
    made["torch.compile"] = lambda: compiled["eager"](query, key, value, u, v, table)
    mask = flex_mask(query, key)
    made["FlexAttention"] = lambda: compiled["flex"](query, key, value, u, v, table, mask)
    return made


def _tactics(shape: Sequence[int]) -> list[Tactic]:
    """The tactics for queries of a shape [B, H, T, K]; single tokens are not computed in tiles."""
    major, minor = torch.cuda.get_device_capability()
    found = tactics(shape[3], 10 * major + minor)
    return [tactic for tactic in found if (shape[2] == 1) == (tactic.block_t == 1)]


def eager(query: Tensor, key: Tensor, value: Tensor, u: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Plain PyTorch: scores with each row of the position table, gathered by distance, then the softmax."""
    distance = _distances(query, key)
    by_row = (query + v) @ table.transpose(1, 2)
    rows = distance.clamp(0, table.shape[1] - 1).expand(*query.shape[:2], -1, -1)
    scores = (query + u) @ key.transpose(2, 3) + by_row.gather(3, rows)
    hidden = (distance < 0) | (distance > key.shape[2] - query.shape[2])
    return (
        scores.masked_fill(hidden, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
    )


def flex(query: Tensor, key: Tensor, value: Tensor, u: Tensor, v: Tensor, table: Tensor, mask: Any) -> Tensor:
    """FlexAttention, whose score function looks up the position scores in a tensor [B, H, T, R]."""
    from torch.nn.attention.flex_attention import flex_attention

    by_row = (query + v) @ table.transpose(1, 2)
    M = key.shape[2] - query.shape[2]
    last = table.shape[1] - 1

    def with_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + by_row[b, h, i, (M + i - j).clamp(0, last)]

    answer: Tensor = flex_attention(
        query + u, key, value, score_mod=with_position, block_mask=mask, scale=1.0
    )
    return answer


def flex_mask(query: Tensor, key: Tensor) -> Any:
    """The mask of visible keys, by which FlexAttention skips blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    T = query.shape[2]
    J = key.shape[2]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= i) & (j <= J - T + i)

    return create_block_mask(seen, None, None, T, J, device=str(query.device))


def _distances(query: Tensor, key: Tensor) -> Tensor:
    T = query.shape[2]
    J = key.shape[2]
    return J - T + torch.arange(T, device=query.device)[:, None] - torch.arange(J, device=query.device)


def _sizes(row: Figures, run: Run) -> str:
    return " ".join(f"{letter} {size}" for letter, size in row["shape"].items())


CASE = Case(
    name="triton-kernel",
    run=run,
    keys=("shape", "side"),
    columns=(
        Column("shape", _sizes),
        Column("side", "side"),
        Column("ms", "attention"),
        Column("at least by reading, ms", "reading"),
        Column("at least by computing, ms", "computing"),
        Column("", lambda row, run: f"not timed: {row['problem']}" if row["problem"] else ""),
    ),
    # The shapes that were measured are in the rows.
    size=lambda options: dataclasses.replace(CONFIGS["enwik8-base"], name="shapes"),
    unavailable=unavailable,
    engine="torch",
    precision="fp16",
)
