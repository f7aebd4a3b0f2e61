"""Steps on an NVIDIA GPU: TensorRT's engines, ONNX Runtime's providers, PyTorch, and training.

Each side is a process of its own with a limit, so a side that crashes or hangs ends no other. It is compared
with the CPU first and timed only if its answers are right; otherwise its row says what is wrong. The limits
are the GPU's own, measured in the same run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arithmetic import FLOAT, step_bytes
from benchmarks.case import Case, Cell, Column, Job, number, option
from benchmarks.cases.on_gpu.rates import Rates, measure_rates
from benchmarks.cases.on_gpu.sides import (
    BATCHES,
    MODELS,
    SIDES,
    TRAININGS,
    Graph,
    Side,
    matching,
    model_on,
    open_side,
    problems,
    recipe_of,
    rule_of,
    timed_step,
    training_difference,
    training_step,
)
from benchmarks.checked_sessions import filled
from benchmarks.configs import CONFIGS, BenchmarkConfig
from benchmarks.measure import Timing, take_turns
from benchmarks.runs import Figures, History, Run
from runtimes import Session
from runtimes.base.errors import UserError, first_line, of_library
from runtimes.base.files import read_json, write_json
from runtimes.base.records import from_json, to_json
from runtimes.contract.memory import Memory
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.sessions.ort_gpu.driver import ask_driver
from trainer.model.arithmetic import step_multiply_adds, training_multiply_adds, with_head

ROOT = Path(__file__).parents[3]
DEVICE = "cuda"
MINUTES = 10.0  # of one side, with its export and build
TRAINING_REPEATS = 12
WEIGHT_BYTES: dict[Precision, float] = {
    "fp32": 4,
    "fp16": 2,
    "int8-stored": 4,  # once the graph is loaded
    "int8": 1,
    "int4": 0.5,
}
MEMORY_BYTES: dict[MemoryPrecision, float] = {"fp32": 4, "fp16": 2, "int8": 1}  # without the scales of int8
_OF_SESSIONS = {side.name: side for side in SIDES}
RATES = "rates"  # the first "side": what the GPU can do at best
NAMES = (*_OF_SESSIONS, *MODELS, *TRAININGS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of one side: `batch` streams of `tokens` tokens each, with full memory."""

    side: str
    batch: int | None = None
    tokens: int | None = None
    step: Timing | None = None  # of the whole step; None if the side is wrong
    reading: float | None = None  # least milliseconds by the bytes that the step reads and writes
    computing: float | None = None  # least milliseconds by its multiply-adds
    problem: str = ""  # why nothing was timed
    fact: str = ""  # what computes, and what the build reported
    device: str = ""  # name of the GPU


def run(job: Job) -> Iterator[Row]:
    """Rows for each side, each kept as soon as it is known. Every call measures everything again."""
    name_of_size = job.config.name
    for name in (RATES, *(job["names"] or NAMES)):
        job.progress(f"{name_of_size}, {name}: comparing with the CPU, then timing")
        for row in in_process(name, job.config, job.folder, job["repeats"]):
            job.progress(f"{name_of_size}, {name}: {_line(row)}")
            job.keep(row)
            yield row


def in_process(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> list[Row]:
    """The rows of a side, from a process that is killed at its limit."""
    out = work / "rows.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, name, config.name, str(work), str(repeats or 0), str(out)]
    try:
        code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=60 * MINUTES).returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        problem = f"its process ended with {how}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"it was stopped after {MINUTES:g} minutes"
    rows = [from_json(Row, document, where=name) for document in read_json(out)] if out.exists() else []
    return [*rows, Row(side=name, problem=problem)] if problem else rows


def measure(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    """The rows of a side; an error becomes a row with a problem."""
    try:
        for row in _rows_of(name, config, work, repeats):
            yield replace(row, device=_gpu_name())
    except BaseException as error:
        if not of_library(error):
            raise
        traceback.print_exc()
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        yield Row(side=name, problem=said)


def _rows_of(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    if name in _OF_SESSIONS:
        return _session_rows(_OF_SESSIONS[name], config, work, repeats)
    if name in TRAININGS:
        return _training_rows(name, config, work, repeats)
    if name in MODELS:
        return _model_rows(name, config, work, repeats)
    return iter([_measured_rates(work)])


def _session_rows(side: Side, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    opened = open_side(side, config, work)
    fact = f"{opened.session.computed_by}; {opened.built}".removesuffix("; ")
    if found := problems(opened):
        yield Row(side=side.name, problem="; ".join(found), fact=fact)
        return
    for batch, tokens, count in _steps(config, repeats):
        timing = take_turns({"step": _call(opened.session, batch, tokens)}, repeats=count)["step"]
        row = Row(side=side.name, batch=batch, tokens=tokens, step=timing, fact=fact)
        yield _limited(row, config, side.graph, side.graph.computes_in_halves, work)


def _model_rows(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    model, difference, tolerance = model_on(name, config, work, DEVICE)
    if not difference <= tolerance:
        yield Row(side=name, problem=_too_far(difference, tolerance))
        return
    halves, compiled = MODELS[name]
    graph = Graph(form="shift", precision="fp16" if halves else "fp32")
    for batch, tokens, count in _steps(config, repeats):
        call = timed_step(model, config, batch, tokens, compiled=compiled)
        timing = take_turns({"step": call}, repeats=count)["step"]
        row = Row(side=name, batch=batch, tokens=tokens, step=timing)
        yield _limited(row, config, graph, halves, work)


def _training_rows(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    difference, tolerance = training_difference(name, DEVICE)
    if not difference <= tolerance:
        yield Row(side=name, problem=_too_far(difference, tolerance))
        return
    recipe = recipe_of(name, config)
    step = training_step(recipe, DEVICE)
    timing = take_turns({"step": step}, repeats=repeats or TRAINING_REPEATS)["step"]
    count = training_multiply_adds(recipe.model, recipe.training, recipe.batch)
    rates = _rates(work)
    yield Row(
        side=name,
        batch=recipe.batch,
        tokens=recipe.training.segment,
        step=timing,
        computing=rates.computing(count, halves=recipe.autocast != "none") if rates else None,
        fact=f"at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of device memory",
    )


def _steps(config: BenchmarkConfig, repeats: int | None) -> Iterator[tuple[int, int, int]]:
    """Streams, tokens and timed calls of each step."""
    for batch in BATCHES:
        yield batch, 1, repeats or config.token_repeats
        yield batch, config.segment, repeats or 4 * config.repeats


def _call(session: Session, batch: int, tokens: int) -> Callable[[], Any]:
    """Predicts from one token or scores a segment, as generation and scoring do."""
    memory: Memory = filled(session, batch)
    segment = np.zeros((batch, tokens), np.int64)
    if tokens == 1:
        return lambda: session.predict(segment, memory)
    return lambda: session.score(segment, segment, memory)


def _too_far(difference: float, tolerance: float) -> str:
    return f"it differs from the CPU by {difference:.3g} nats, more than {tolerance:g}"


def _limited(row: Row, config: BenchmarkConfig, graph: Graph, halves: bool, work: Path) -> Row:
    """The row with the limits of the GPU. halves: whether the step computes in fp16, memory included."""
    rates = _rates(work)
    if rates is None:
        return row
    assert row.batch is not None
    assert row.tokens is not None
    rule = rule_of(config, graph.mask)
    model = with_head(config.model)
    count = row.batch * step_multiply_adds(model, rule, graph.form, row.tokens)
    return replace(
        row,
        reading=rates.reading(least_bytes(config, graph, row.batch, halves=halves)),
        computing=rates.computing(count, halves=halves),
    )


def least_bytes(config: BenchmarkConfig, graph: Graph, batch: int, *, halves: bool) -> float:
    """The bytes of weights, position tables and visible memory that a step reads and writes.

    The form `shift` also writes its whole memory again. Only the head of an adaptive softmax is counted.
    """
    rule = rule_of(config, graph.mask)
    model = with_head(config.model)
    weights_and_tables = step_bytes(model, rule, graph.form, streams=0) / FLOAT
    tables = model.layers * model.heads * model.head_dim * rule.position_rows
    seen = step_bytes(model, rule, graph.form, streams=batch) / FLOAT - weights_and_tables
    moved = 3 * seen if graph.form == "shift" else seen  # read, and read once more and written
    matrices = WEIGHT_BYTES[graph.precision] * (weights_and_tables - tables)
    return matrices + (2 if halves else 4) * tables + (2 if halves else MEMORY_BYTES[graph.memory]) * moved


def _measured_rates(work: Path) -> Row:
    rates = measure_rates()
    write_json(work / "rates.json", asdict(rates))
    fact = (
        f"a large copy {rates.copy / 1e9:.0f} GB/s; products {rates.halves / 1e12:.1f} T multiply-adds/s in "
        f"fp16, {rates.singles / 1e12:.1f} T in fp32; {rates.launch:.2f} µs a kernel in a CUDA graph"
    )
    return Row(side=RATES, fact=fact)


def _rates(work: Path) -> Rates | None:
    """The rates of this run's GPU; None if they could not be measured."""
    path = work / "rates.json"
    if not path.is_file():
        return None
    return Rates(**read_json(path))


def _gpu_name() -> str:
    gpus = ask_driver().gpus
    return gpus[0].name if gpus else ""


def _line(row: Row) -> str:
    """A row in words."""
    if row.step is None:
        return f"not timed: {row.problem}" if row.problem else row.fact
    return f"{row.batch} x {row.tokens} tokens: {row.step.median:.4g} ms"


def _of_step(value: Callable[[Figures], str]) -> Cell:
    return lambda row, run: value(row) if row["step"] else ""


def _least(row: Figures) -> float | None:
    """The least milliseconds that the limits of the GPU allow; None without a limit."""
    return max((ms for ms in (row["reading"], row["computing"]) if ms is not None), default=None)


def newest(history: History) -> list[Run]:
    """The runs of the size and the commit that were measured last."""
    runs = history.of("gpu")
    same = ("config", "commit")
    return [run for run in runs if all(run.document[key] == runs[-1].document[key] for key in same)]


CASE = Case(
    name="gpu",
    run=run,
    keys=("side", "batch", "tokens"),
    columns=(
        Column("side", "side"),
        Column("streams", "batch"),
        Column("tokens", "tokens"),
        Column("ms", "step"),
        Column("at least", _of_step(lambda row: number(_least(row) or 0) if _least(row) else "unknown")),
        Column(
            "times",
            _of_step(lambda row: f"{row['step']['median'] / least:.1f}" if (least := _least(row)) else ""),
        ),
        Column(
            "tokens/s",
            _of_step(lambda row: f"{row['batch'] * row['tokens'] / row['step']['median'] * 1e3:,.0f}"),
        ),
        Column(
            "",
            lambda row, run: (
                f"not timed: {row['problem']}" if row["problem"] else row["fact"] * (not row["step"])
            ),
        ),
    ),
    options=(
        "config",
        "repeats",
        option(
            "--only names",
            "Measure this side only, with * for any text; may be repeated.",
            multiple=True,
            callback=lambda ctx, option, patterns: matching(patterns, NAMES),
        ),
    ),
    unavailable=lambda: ask_driver().fault,
    published=newest,
    notes=lambda lines: sorted({f"GPU: {line.row['device']}." for line in lines if line.row["device"]}),
    resumable=True,
    precision="mixed",
)


def main(arguments: Sequence[str]) -> None:
    """The process of one side, which writes its rows as JSON."""
    name, config, work, repeats, out = arguments
    rows = []
    for row in measure(name, CONFIGS[config], Path(work), int(repeats) or None):
        rows.append(to_json(row))
        write_json(Path(out), rows)  # after each row, so that a crash loses none


if __name__ == "__main__":
    main(sys.argv[1:])
