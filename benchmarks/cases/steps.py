"""One step with full memory on ONNX Runtime and in PyTorch: the cases decode, segment and batch.

The memory of both sides holds keys and values, so neither computes the past again. The export has compared
the artefact with PyTorch. The least time of a step is the longer of two: reading weights, tables and visible
memory, and computing the multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.arithmetic import step_bytes
from benchmarks.case import Case, Cell, Column, Job, number, per_second
from benchmarks.checked_sessions import Operators, open_checked, step_of
from benchmarks.configs import CONFIGS
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_artefact, random_run
from benchmarks.plot import draw_lines
from benchmarks.runs import History, Run
from trainer.model.arithmetic import step_multiply_adds
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of step: memory length (M), number of streams (B), and tokens of each stream (T)."""

    mem_len: int
    batch: int
    tokens: int
    #: Of ONNX Runtime's side.
    operators: Operators
    #: Times per token, which is the time of the step over B·T.
    onnxruntime: Timing
    pytorch: Timing
    #: Of the whole step.
    num_bytes: int
    multiply_adds: int
    #: PyTorch's time divided by ONNX Runtime's.
    ratio: float


def decode(job: Job) -> Iterator[Row]:
    """A row of one token for each length of memory."""
    for length in job["attention_lengths"] or job.config.attention_lengths:
        yield from _measured(job.with_memory(length), [(1, 1)], job.config.token_repeats)


def segment(job: Job) -> Iterator[Row]:
    """One row: a step of as many tokens as the segment of the configuration has."""
    return _measured(job, [(1, job.config.segment)], job.config.repeats)


def batch(job: Job) -> Iterator[Row]:
    """A row for each number of streams, with one token of each."""
    return _measured(job, [(streams, 1) for streams in job.config.streams], job.config.repeats)


def _measured(job: Job, steps: Sequence[tuple[int, int]], repeats: int) -> Iterator[Row]:
    """A row for each pair (batch, tokens) of `steps`."""
    rule = job.rule
    repeats = job.repeats(repeats)
    artefact = open_checked(random_artefact(job), threads=job.threads, operators=job.operators)
    run = load_run(random_run(job))
    torch.set_num_threads(job.threads)
    torch_run = ProjectedTorchSession(run.model.eval(), run.vocab, rule, weights=run.sha256)
    for batch, tokens in steps:
        job.progress(f"memory of {rule.mem_len} tokens: timing {repeats} steps of {batch} x {tokens} tokens")
        sides = {
            "onnxruntime": step_of(artefact, batch, tokens),
            "pytorch": step_of(torch_run, batch, tokens),
        }
        num_bytes = step_bytes(job.config.model, rule, "ring", streams=batch)
        timed = take_turns(sides, repeats=repeats)
        yield Row(
            mem_len=rule.mem_len,
            batch=batch,
            tokens=tokens,
            operators=job.operators,
            **{name: timing.per(batch * tokens) for name, timing in timed.items()},
            num_bytes=num_bytes,
            multiply_adds=batch * step_multiply_adds(job.config.model, rule, "ring", tokens),
            ratio=timed["pytorch"].median / timed["onnxruntime"].median,
        )


def _of_step(side: str) -> Cell:
    return lambda row, run: number(row[side]["median"] * row["batch"] * row["tokens"])


COLUMNS = (
    Column("memory, tokens", "mem_len"),
    Column("streams", "batch"),
    Column("tokens of each", "tokens"),
    Column(
        "at least, ms",
        lambda row, run: number(max(run.reading(row["num_bytes"]), run.computing(row["multiply_adds"]))),
        note="At least: what the step must read and multiply, at the machine's best rates.",
    ),
    Column("ONNX Runtime, ms", _of_step("onnxruntime")),
    Column("PyTorch, ms", _of_step("pytorch")),
    Column("PyTorch / ONNX Runtime", "ratio", ".2f"),
    Column("ONNX Runtime, tokens/s", "onnxruntime", per_second),
)
KEYS = ("mem_len", "batch", "tokens", "operators")
BASE = CONFIGS["enwik8-base"]
STEP_OPTIONS = ("config", "repeats", "mem-len", "operators")


def _published(case: str, name: str, values: Sequence[int]) -> Callable[[History], list[Run]]:
    """The newest run with fused operators that has a row for each of these values."""
    return lambda history: [history.newest(case, BASE.name, operators="fused", rows=(name, values))]


DECODE = Case(
    name="decode",
    run=decode,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=("config", "repeats", "attention-lengths", "operators"),
    published=_published("decode", "mem_len", BASE.attention_lengths),
    draw=draw_lines(
        "mem_len",
        {"PyTorch": "pytorch", "ONNX Runtime": "onnxruntime"},
        "memory length M (tokens)",
    ),
)
SEGMENT = Case(
    name="segment",
    run=segment,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=STEP_OPTIONS,
    published=_published("segment", "tokens", (BASE.segment,)),
)
BATCH = Case(
    name="batch",
    run=batch,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=STEP_OPTIONS,
    published=_published("batch", "batch", BASE.streams),
)
