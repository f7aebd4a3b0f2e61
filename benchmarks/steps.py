"""Steps with full memory on ONNX Runtime and in PyTorch: what the cases decode, segment and batch share.

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
from benchmarks.checked_sessions import Operators, open_checked
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Limits, TimesReading, Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from runtimes.base.records import to_json
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of step: memory length (M), number of streams (B), and tokens of each stream (T).

    onnxruntime, pytorch: times per token, which is the time of the step over B·T. operators: of ONNX
    Runtime's side. num_bytes, multiply_adds: of the whole step. tolerance: of the comparison with PyTorch, in
    nats.
    """

    mem_len: int
    batch: int
    tokens: int
    operators: Operators
    onnxruntime: Timing
    pytorch: Timing
    num_bytes: int
    multiply_adds: int
    tolerance: float

    @property
    def ratio(self) -> float:
        return self.pytorch.median / self.onnxruntime.median

    def at_least(self, limits: Limits) -> float:
        """The least milliseconds per token that the limits of the machine allow."""
        reading = limits.read_milliseconds(self.num_bytes)
        computing = limits.compute_milliseconds(self.multiply_adds)
        return max(reading, computing) / (self.batch * self.tokens)

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "ratio": self.ratio}


def measure_steps(
    config: BenchmarkConfig,
    mem_len: int,
    steps: Sequence[tuple[int, int]],
    *,
    threads: int,
    repeats: int,
    operators: Operators,
    progress: Progress,
) -> list[Row]:
    """A row for each pair (batch, tokens) of `steps`."""
    rule, weights = MemoryRule(mem_len=mem_len, segment=config.segment), random_weights(config.model)
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
    draw, memory = np.random.default_rng(0), session.start(batch)
    while memory.positions[0] <= session.rule.slots:
        _, memory = session.predict(
            draw.integers(0, session.vocab.size, (batch, session.rule.segment)), memory
        )
    return memory


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text, with the least time by the measured rates of the machine."""
    lines = [
        "                           ms per token                       PyTorch /     tokens/s      times",
        "memory  streams  tokens in  ONNX Runtime  at least  PyTorch  ONNX Runtime  ONNX Runtime  reading",
        "                 the step",
    ]
    for row in rows:
        lines.append(
            f"{row.mem_len:6,}  {row.batch:<7}  {row.tokens:<9}  {row.onnxruntime.median:<12.3g}  "
            f"{row.at_least(limits):<8.3g}  {row.pytorch.median:<7.3g}  {row.ratio:<12.2f}  "
            f"{f'{1e3 / row.onnxruntime.median:,.0f}':12}  {in_pairs(row.onnxruntime.reading)}"
        )
    return lines


def in_pairs(reading: TimesReading | None) -> str:
    """How many times as long as reading the calls took, and between what."""
    return "" if reading is None else f"{reading.middle:.2f} ({reading.low:.2f} to {reading.high:.2f})"


def _step(session: Session, batch: int, tokens: int) -> Callable[[], Any]:
    memory, segment = filled(session, batch), np.zeros((batch, tokens), np.int64)
    return lambda: session.step(segment, memory)
