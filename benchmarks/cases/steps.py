"""One step with full memory on ONNX Runtime and in PyTorch: the cases decode, segment and batch.

The memory of both sides holds keys and values, so neither computes the past again. The export has compared
the artefact with PyTorch. The least time of a step is the longer of two: reading weights, tables and visible
memory, and computing the multiply-adds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arithmetic import step_bytes, step_multiply_adds
from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    config_option,
    decimal,
    lengths_option,
    megabytes,
    mem_len_option,
    number,
    operators_option,
    repeats_option,
    whole,
)
from benchmarks.checked_sessions import Operators, open_checked
from benchmarks.configs import CONFIGS, BenchmarkConfig, checked_lengths, checked_repeats, checked_threads
from benchmarks.measure import Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from benchmarks.plot import draw_decode
from benchmarks.runs import History, Run
from benchmarks.runs import Row as Figures
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
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
    #: Of the comparison with PyTorch, in nats.
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "ratio": self.pytorch.median / self.onnxruntime.median}


def decode(
    config: BenchmarkConfig, *, attention_lengths: Sequence[int] | None = None, **settings: Any
) -> list[Row]:
    """A row of one token for each length of memory."""
    lengths = checked_lengths(list(attention_lengths or config.attention_lengths))
    return [
        row
        for length in lengths
        for row in measure_steps(
            config, [(1, 1)], length, repeats_by_default=config.token_repeats, **settings
        )
    ]


def segment(config: BenchmarkConfig, *, mem_len: int | None = None, **settings: Any) -> list[Row]:
    """One row: a step of as many tokens as the segment of the configuration has."""
    return measure_steps(config, [(1, config.segment)], mem_len, **settings)


def batch(config: BenchmarkConfig, *, mem_len: int | None = None, **settings: Any) -> list[Row]:
    """A row for each number of streams, with one token of each."""
    return measure_steps(config, [(streams, 1) for streams in config.streams], mem_len, **settings)


def measure_steps(
    config: BenchmarkConfig,
    steps: Sequence[tuple[int, int]],
    mem_len: int | None = None,
    *,
    threads: int | None = None,
    repeats: int | None = None,
    repeats_by_default: int | None = None,
    operators: Operators = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each pair (batch, tokens) of `steps`. None is the value of the configuration."""
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, repeats_by_default or config.repeats)
    mem_len = config.mem_len if mem_len is None else mem_len
    rule = MemoryRule(mem_len=mem_len, segment=config.segment)
    weights = random_weights(config.model)
    progress(f"memory of {mem_len} tokens: exporting and comparing with PyTorch")
    with tempfile.TemporaryDirectory() as folder:
        artefact, torch_run = open_both(
            Path(folder), config, rule, weights, threads=threads, operators=operators
        )
        assert artefact.spec is not None, "the session of an artefact has a spec"
        rows = []
        for batch, tokens in steps:
            progress(f"memory of {mem_len} tokens: timing {repeats} steps of {batch} x {tokens} tokens")
            sides = {
                "onnxruntime": _step(artefact, batch, tokens),
                "pytorch": _step(torch_run, batch, tokens),
            }
            num_bytes = step_bytes(config.model, rule, "ring", streams=batch)
            timed = take_turns(sides, repeats=repeats, num_bytes={"onnxruntime": num_bytes}, threads=threads)
            times = {name: timing.per(batch * tokens) for name, timing in timed.items()}
            rows.append(
                Row(
                    mem_len=mem_len,
                    batch=batch,
                    tokens=tokens,
                    operators=operators,
                    **times,
                    num_bytes=num_bytes,
                    multiply_adds=batch * step_multiply_adds(config.model, rule, "ring", tokens),
                    tolerance=artefact.spec.tolerance,
                )
            )
        return rows


def open_both(
    folder: Path,
    config: BenchmarkConfig,
    rule: MemoryRule,
    weights: Weights,
    *,
    threads: int,
    operators: Operators = "standard",
) -> tuple[Session, Session]:
    """Sessions of the same weights: an artefact on ONNX Runtime, and its run in PyTorch."""
    artefact = write_artefact(folder, config.model, rule, weights, "ring")
    run = load_run(artefact.with_name(artefact.name.replace("artefact", "run")))
    torch.set_num_threads(threads)
    torch_run = ProjectedTorchSession(run.model.eval(), run.vocab, rule, identity=run.sha256)
    return open_checked(artefact, threads=threads, operators=operators), torch_run


def filled(session: Session, batch: int) -> Memory:
    """The memory of streams that have run once around the ring."""
    draw = np.random.default_rng(0)
    memory = session.start(batch)
    while memory.positions[0] <= session.rule.slots:
        _, memory = session.predict(
            draw.integers(0, session.vocab.size, (batch, session.rule.segment)), memory
        )
    return memory


def _step(session: Session, batch: int, tokens: int) -> Callable[[], Any]:
    memory = filled(session, batch)
    segment = np.zeros((batch, tokens), np.int64)
    return lambda: session.step(segment, memory)


def _of_step(side: str) -> Callable[[Figures, Run], str]:
    return lambda row, run: number(row[side]["median"] * row["batch"] * row["tokens"])


def _times_reading(row: Figures, run: Run) -> str:
    reading = row["onnxruntime"].get("reading")
    return (reading and f"{reading['middle']:.2f} ({reading['low']:.2f} to {reading['high']:.2f})") or ""


COLUMNS = (
    Column("memory, tokens", whole("mem_len")),
    Column("streams", whole("batch")),
    Column("tokens of each", whole("tokens")),
    Column("MB to read", lambda row, run: megabytes(row["num_bytes"]), detail=True),
    Column(
        "at least, ms",
        lambda row, run: number(max(run.reading(row["num_bytes"]), run.computing(row["multiply_adds"]))),
        note="At least: what the step must read and multiply, at the machine's best rates.",
    ),
    Column("ONNX Runtime, ms", _of_step("onnxruntime")),
    Column("PyTorch, ms", _of_step("pytorch")),
    Column("PyTorch / ONNX Runtime", decimal("ratio")),
    Column("ONNX Runtime, tokens/s", lambda row, run: f"{1e3 / row['onnxruntime']['median']:,.0f}"),
    Column(
        "times reading",
        _times_reading,
        note="Times reading: the median ratio, and its 10th and 90th percentile, of a step to reading as "
        "many bytes just before and after it. Ratios below 1 are noise: the memory's speed changed.",
        detail=True,
    ),
)
KEYS = ("mem_len", "batch", "tokens", "operators")
BASE = CONFIGS["enwik8-base"]
STEP_OPTIONS = (config_option, repeats_option, mem_len_option, operators_option)


def _published(case: str, name: str, values: Sequence[int]) -> Callable[[History], list[Run]]:
    """The newest run with fused operators that has a row for each of these values."""
    return lambda history: [history.newest(case, BASE.name, operators="fused", rows=(name, values))]


DECODE = Case(
    name="decode",
    summary="one token at several memory lengths: ONNX Runtime against PyTorch with the same memory",
    run=decode,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=(config_option, repeats_option, lengths_option, operators_option),
    published=_published("decode", "mem_len", BASE.attention_lengths),
    draw=draw_decode,
)
SEGMENT = Case(
    name="segment",
    summary="one whole segment: ONNX Runtime against PyTorch",
    run=segment,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=STEP_OPTIONS,
    published=_published("segment", "tokens", (BASE.segment,)),
)
BATCH = Case(
    name="batch",
    summary="one token of each of 1, 8 and 32 independent streams: ONNX Runtime against PyTorch",
    run=batch,
    keys=KEYS,
    columns=COLUMNS,
    notes=lambda lines: ["Times are of a whole step."],
    options=STEP_OPTIONS,
    published=_published("batch", "batch", BASE.streams),
)
