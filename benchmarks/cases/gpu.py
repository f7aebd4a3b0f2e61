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
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arithmetic import FLOAT, step_bytes
from benchmarks.checked_sessions import filled
from benchmarks.configs import BenchmarkConfig
from benchmarks.gpu.rates import Rates, measure_rates
from benchmarks.gpu.sides import (
    BATCHES,
    MODELS,
    SIDES,
    TRAININGS,
    Graph,
    Side,
    model_on,
    open_side,
    problems,
    recipe_of,
    rule_of,
    timed_step,
    training_difference,
    training_step,
)
from benchmarks.harness import Column, Document, Job, Row, number, only_option
from benchmarks.measure import take_turns, timing
from runtimes import Session
from runtimes.base.errors import UserError, first_line, of_library
from runtimes.base.files import read_json, write_json
from runtimes.base.records import from_json, to_json
from runtimes.contract.memory import Memory
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.sessions.ort_gpu.driver import ask_driver
from trainer.model.arithmetic import step_multiply_adds, training_multiply_adds, with_head

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
MINUTES_PER_SIDE = 10.0  # with its export and build
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


KEEPS_ROWS = True


def run(job: Job) -> Iterator[Row]:
    """Rows for each side: a step of `batch` streams of `tokens` tokens each with full memory, or a problem.

    `device` is the name of the GPU, `fact` what computes, `reading_ms` and `computing_ms` the least times by
    bytes and by multiply-adds.
    """
    write_json(job.folder / "config.json", to_json(job.config))
    for name in (RATES, *(job["only"] or NAMES)):
        job.say(f"{job.config.name}, {name}: comparing with the CPU, then timing")
        for row in in_process(name, job.folder, job["repeats"]):
            job.say(f"{job.config.name}, {name}: {_line(row)}")
            yield row


def in_process(name: str, work: Path, repeats: int | None) -> list[Row]:
    """The rows of a side, from a process that is killed at its limit. `work` has the size as config.json."""
    out = work / "rows.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, name, str(work), str(repeats or 0)]
    try:
        code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=60 * MINUTES_PER_SIDE).returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        problem = f"its process ended with {how}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"it was stopped after {MINUTES_PER_SIDE:g} minutes"
    rows: list[Row] = read_json(out) if out.exists() else []
    return [*rows, {"side": name, "problem": problem}] if problem else rows


def measure(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    """The rows of a side; an error becomes a row with a problem."""
    try:
        for row in _rows_of(name, config, work, repeats):
            yield row | {"device": _gpu_name()}
    except BaseException as error:
        if not of_library(error):
            raise
        traceback.print_exc()
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        yield {"side": name, "problem": said}


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
        yield {"side": side.name, "problem": "; ".join(found), "fact": fact}
        return
    for batch, tokens, count in _steps(config, repeats):
        step_ms = _timed(_call(opened.session, batch, tokens), count)
        row = {"side": side.name, "batch": batch, "tokens": tokens, "step_ms": step_ms, "fact": fact}
        yield _limited(row, config, side.graph, side.graph.computes_in_halves, work)


def _model_rows(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    model, difference, tolerance = model_on(name, config, work, DEVICE)
    if not difference <= tolerance:
        yield {"side": name, "problem": _too_far(difference, tolerance)}
        return
    halves, compiled = MODELS[name]
    graph = Graph(form="shift", precision="fp16" if halves else "fp32")
    for batch, tokens, count in _steps(config, repeats):
        call = timed_step(model, config, batch, tokens, compiled=compiled)
        row = {"side": name, "batch": batch, "tokens": tokens, "step_ms": _timed(call, count)}
        yield _limited(row, config, graph, halves, work)


def _training_rows(name: str, config: BenchmarkConfig, work: Path, repeats: int | None) -> Iterator[Row]:
    difference, tolerance = training_difference(name, DEVICE)
    if not difference <= tolerance:
        yield {"side": name, "problem": _too_far(difference, tolerance)}
        return
    recipe = recipe_of(name, config)
    step = training_step(recipe, DEVICE)
    step_ms = _timed(step, repeats or TRAINING_REPEATS)
    count = training_multiply_adds(recipe.model, recipe.training, recipe.batch)
    rates = _rates(work)
    yield {
        "side": name,
        "batch": recipe.batch,
        "tokens": recipe.training.segment,
        "step_ms": step_ms,
        "computing_ms": rates.computing(count, halves=recipe.autocast != "none") if rates else None,
        "fact": f"at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of device memory",
    }


def _timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    return timing(take_turns({"step": call}, repeats=repeats)["step"])


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
    rule = rule_of(config, graph.mask)
    model = with_head(config.model)
    count = row["batch"] * step_multiply_adds(model, rule, graph.form, row["tokens"])
    num_bytes = least_bytes(config, graph, row["batch"], halves=halves)
    return row | {
        "reading_ms": rates.reading(num_bytes),
        "computing_ms": rates.computing(count, halves=halves),
    }


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
    return {"side": RATES, "fact": fact}


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
    if "step_ms" not in row:
        return f"not timed: {row['problem']}" if row.get("problem") else str(row["fact"])
    return f"{row['batch']} x {row['tokens']} tokens: {row['step_ms']['median']:.4g} ms"


def _least(row: Row, document: Document) -> float | None:
    """The least milliseconds that the limits of the GPU allow; None without a limit."""
    return max(
        (ms for ms in (row.get("reading_ms"), row.get("computing_ms")) if ms is not None), default=None
    )


def _of_step(value: Callable[[float, Row], Any]) -> Column:
    """A column with a function of the median of a step."""
    return lambda row, _: value(row["step_ms"]["median"], row) if row.get("step_ms") else None


def unavailable() -> str | None:
    """Why this machine has no usable GPU, or None."""
    return ask_driver().fault


OPTIONS = (only_option(NAMES, "Measure this side only"),)
KEYS = ("side", "batch", "tokens")
COLUMNS = {
    "side": "side",
    "streams": "batch",
    "tokens": "tokens",
    "ms": "step_ms",
    "at least, ms": _least,
    "times": _of_step(lambda ms, row: ms / least if (least := _least(row, {})) else None),
    "tokens/s": _of_step(lambda ms, row: number(1e3 * row["batch"] * row["tokens"] / ms)),
    "": lambda row, _: (
        f"not timed: {row['problem']}" if row.get("problem") else "" if "step_ms" in row else row["fact"]
    ),
}


def main(name: str, work: str, repeats: str) -> None:
    """The process of one side, which writes its rows as JSON."""
    config = from_json(BenchmarkConfig, read_json(Path(work) / "config.json"), where="the size")
    rows = []
    for row in measure(name, config, Path(work), int(repeats) or None):
        rows.append(row)
        write_json(Path(work) / "rows.json", rows)  # after each row, so that a crash loses none


if __name__ == "__main__":
    main(*sys.argv[1:])
