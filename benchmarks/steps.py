"""What decode, segment and batch share: steps of some streams and tokens with full memory, on ONNX Runtime and in PyTorch.

Both have keys and values for memory, so neither computes the past again; the artefact was compared with PyTorch when it was
exported. The least time is that of reading weights, tables and visible memory, or of the multiply-adds, whichever is longer.
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
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import Weights, random_weights, write_artefact
from benchmarks.operators import open_checked
from runtimes.base.records import to_json
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.onnx_runtime import Kernel, OrtSession
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of step: M, streams (B) and tokens of each (T). Times are per token of each stream that is wanted: of B·T of them.

    kernel: ONNX Runtime's operators. tolerance: that `export` held its side to against PyTorch, nats.
    """

    mem_len: int
    batch: int
    tokens: int
    kernel: Kernel
    onnxruntime: Timing
    pytorch: Timing
    num_bytes: int
    multiply_adds: int
    tolerance: float

    @property
    def ratio(self) -> float:
        return self.pytorch.median / self.onnxruntime.median

    def at_least(self, limits: Limits) -> float:
        """Milliseconds per token that the machine's limits allow."""
        reading, computing = (
            limits.read_milliseconds(self.num_bytes),
            limits.compute_milliseconds(self.multiply_adds),
        )
        return max(reading, computing) / (self.batch * self.tokens)

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "ratio": self.ratio}


def measure_steps(
    config: BenchmarkConfig, mem_len: int, steps: Sequence[tuple[int, int]], *, threads: int, repeats: int, kernel: Kernel,
    progress: Progress,
) -> list[Row]:  # fmt: skip
    """A row for each (batch, tokens) of steps."""
    rule, weights = MemoryRule(mem_len=mem_len, segment=config.segment), random_weights(config.model)
    progress(f"memory {mem_len}: exporting, with comparison against PyTorch")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = open_both(Path(folder), config, rule, weights, threads=threads, kernel=kernel)
        rows = []
        for batch, tokens in steps:
            progress(f"memory {mem_len}: timing {repeats} steps of {batch} x {tokens} tokens")
            sides = {"onnxruntime": _step(ours, batch, tokens), "pytorch": _step(theirs, batch, tokens)}
            times = {
                name: timing.per(batch * tokens)
                for name, timing in take_turns(sides, repeats=repeats).items()
            }
            rows.append(
                Row(
                    mem_len=mem_len, batch=batch, tokens=tokens, kernel=kernel, **times,
                    num_bytes=step_bytes(config.model, rule, "ring", streams=batch),
                    multiply_adds=batch * step_multiply_adds(config.model, rule, "ring", tokens), tolerance=ours.spec.tolerance,
                )
            )  # fmt: skip
        return rows


def open_both(
    folder: Path,
    config: BenchmarkConfig,
    rule: MemoryRule,
    weights: Weights,
    *,
    threads: int,
    kernel: Kernel = "standard",
) -> tuple[OrtSession, ProjectedTorchSession]:
    """Sessions of the same weights on both engines."""
    artefact = write_artefact(folder, config.model, rule, weights, "ring")
    run = load_run(artefact.with_name(artefact.name.replace("artefact", "run")))
    torch.set_num_threads(threads)
    theirs = ProjectedTorchSession(run.model.eval(), run.vocab, rule, identity=run.sha256)
    return open_checked(artefact, threads=threads, kernel=kernel), theirs


def filled(session: Session, batch: int) -> Memory:
    """Memory of streams that have run once around the ring."""
    draw, memory = np.random.default_rng(0), session.start(batch)
    while memory.positions[0] <= session.rule.slots:
        _, memory = session.predict(
            draw.integers(0, session.vocab.size, (batch, session.rule.segment)), memory
        )
    return memory


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text; the least time is by the machine's measured rates."""
    lines = [
        "                                   ms per token                 times     tokens/s",
        "memory  streams  tokens in a step  ONNX Runtime  at least  PyTorch  slower    ONNX Runtime",
    ]
    for row in rows:
        lines.append(
            f"{row.mem_len:6,}  {row.batch:<7}  {row.tokens:<16}  {row.onnxruntime.median:<12.3g}  {row.at_least(limits):<8.3g}  "
            f"{row.pytorch.median:<7.3g}  {row.ratio:<8.2f}  {1e3 / row.onnxruntime.median:,.0f}"
        )
    return lines


def _step(session: Session, batch: int, tokens: int) -> Callable[[], Any]:
    memory, segment = filled(session, batch), np.zeros((batch, tokens), np.int64)
    return lambda: session.step(segment, memory)
