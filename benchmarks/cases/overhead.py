"""What a token of a small model costs: ONNX Runtime's run, what Python adds to it, and the least it can take.

A row for each precision of the weights. All sides step one stream, in turns of some dozen tokens, because a
stream's tokens follow one another. A step can take no less than reading its bytes from the processor's cache,
and computing its multiply-adds; both rates are of one core and are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.arithmetic import needed_multiply_adds
from benchmarks.case import Case, Cell, Column, Job, Line, megabytes, microseconds
from benchmarks.checked_sessions import Operators, filled, open_checked
from benchmarks.measure import Limits, Timing, measure_limits, milliseconds, take_turns
from benchmarks.models import random_run
from benchmarks.runs import Figures
from runtimes.contract.precision import Precision
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import FUSED, GRAPH, Spec
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.generate import generate
from xl_export import export

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-stored", "int8", "int4")
REPEATS = 3000  # tokens of each side
TURN = 50  # tokens of one side before the next one
WARM_UP = 20
SETTLE = 5  # untimed tokens at the beginning of a turn
FLOATS_FOR = {ir.DataType.FLOAT16: 2, ir.DataType.INT8: 4}  # times as wide, in bytes
MOST_TOKENS = 10**9  # more than are ever generated


@dataclass(frozen=True, kw_only=True)
class Row:
    """One precision of the weights.

    onnxruntime: its run of one token; the other sides are whole calls of the session, which contain such a
    run. num_bytes, multiply_adds: of the step. cache: the rates of one core, of reading as many bytes again
    and again, and of a large product.
    """

    precision: Precision
    parameters: int
    onnxruntime: Timing
    predict: Timing
    step: Timing
    score: Timing
    generate: Timing
    num_bytes: int
    multiply_adds: int
    cache: Limits
    operators: Operators


def run(job: Job) -> Iterator[Row]:
    """A row for each precision, after a comparison with PyTorch or with the same weights in fp32."""
    repeats = job.repeats(REPEATS)
    computing = measure_limits(1).multiply_adds
    source = random_run(job)
    for precision in PRECISIONS:
        job.progress(f"{precision}: exporting, then timing {repeats} tokens of each side")
        artefact = export(source, job.folder / precision, precision=precision)
        session = open_checked(artefact, threads=job.threads, operators=job.operators)
        calls = sides(session)
        for call in calls.values():
            milliseconds(call, repeats=0, warmup=WARM_UP)
        num_bytes = read_bytes(session.spec, artefact / (FUSED if job.operators == "fused" else GRAPH))
        yield Row(
            precision=precision,
            parameters=session.spec.model.parameters,
            **take_turns(calls, repeats=repeats, turns=-(-repeats // TURN), warmup=SETTLE, rest=False),
            num_bytes=num_bytes,
            multiply_adds=needed_multiply_adds(job.config.model, job.rule, 1),
            cache=Limits(read_bytes=cache_rate(num_bytes), multiply_adds=computing),
            operators=job.operators,
        )


def sides(session: OrtSession) -> dict[str, Callable[[], object]]:
    """A call for each side that computes one token of its own stream, whose memory is full."""
    token = np.zeros((1, 1), np.int64)
    memories = {name: filled(session, 1) for name in ("onnxruntime", "predict", "step", "score")}
    for _ in range(3):  # from then on the session keeps its arrays bound
        session.predict(token, memories["onnxruntime"])
    bound = memories["onnxruntime"].binding.ios[0]
    pieces = generate(session, [0], max_tokens=MOST_TOKENS, sampler=Sampler(top_k=40))
    for _ in range(session.rule.slots):
        next(pieces)
    return {
        "onnxruntime": lambda: memories["onnxruntime"].binding.session.run_with_iobinding(bound),
        "predict": lambda: session.predict(token, memories["predict"]),
        "step": lambda: session.step(token, memories["step"]),
        "score": lambda: session.score(token, token, memories["score"]),
        "generate": lambda: next(pieces),
    }


def read_bytes(spec: Spec, graph: Path) -> int:
    """The bytes that one token must read: weights and tables as they are once loaded, and the visible memory.

    ONNX Runtime folds a Cast from float16 or int8 when it loads a graph, so a table behind one is read in
    float32.
    """
    widths = 0
    for value in ir.load(graph).graph.initializers.values():
        cast = any(node.op_type == "Cast" for node, _ in value.uses())
        factor = FLOATS_FOR.get(value.dtype or ir.DataType.FLOAT, 1) if cast else 1
        widths += value.const_value.nbytes * factor if value.const_value is not None else 0
    return widths + spec.bytes_per_stream * (spec.rule.mem_len + 1) // spec.rule.slots


def cache_rate(num_bytes: int) -> float:
    """Bytes per second at which one core reads so many bytes again and again."""
    numbers = np.ones(num_bytes, np.int8)
    return num_bytes / min(milliseconds(numbers.max, repeats=200)) * 1e3


def _least(row: Figures) -> float:
    """Milliseconds that the step takes at least."""
    cache = row["cache"]
    reading = row["num_bytes"] / cache["read_bytes"]
    return float(1e3 * max(reading, row["multiply_adds"] / cache["multiply_adds"]))


def _adds(side: str, run: str = "onnxruntime") -> Cell:
    """What a side takes longer than its run."""
    return lambda row, _: microseconds(row[side]["median"] - row[run]["median"])


def _notes(lines: Sequence[Line]) -> list[str]:
    return [
        "Run: ONNX Runtime's run of one token. What Python adds is the difference of medians; generate is "
        "compared with predict. At least: the larger of reading the step's bytes from the cache and "
        "computing its multiply-adds, at the rates of one core that were measured in the same run."
    ]


CASE = Case(
    name="overhead",
    run=run,
    keys=("precision", "operators"),
    columns=(
        Column("weights", "precision"),
        Column("parameters, millions", "parameters", lambda count: f"{count / 1e6:.1f}"),
        Column("MB to read", "num_bytes", megabytes),
        Column("at least, µs", lambda row, run: microseconds(_least(row))),
        Column("run, µs", "onnxruntime", microseconds),
        Column("times at least", lambda row, run: f"{row['onnxruntime']['median'] / _least(row):.2f}"),
        Column("predict adds, µs", _adds("predict")),
        Column("step adds, µs", _adds("step")),
        Column("score adds, µs", _adds("score")),
        Column("generate adds, µs", _adds("generate", "predict")),
    ),
    notes=_notes,
    options=("config", "repeats", "operators"),
    published=lambda history: [
        history.newest("overhead", size, operators="fused", threads=1) for size in ("demo", "tales")
    ],
)
