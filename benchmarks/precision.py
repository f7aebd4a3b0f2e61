"""The precision presets beside one another: what one token with full memory costs in each, and how large the artefact is.

Weights are random here, so quality is not measured: every export below fp32 measures that on the run's own text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.kernels import open_checked
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import random_weights, write_run
from benchmarks.steps import Progress, filled
from runtimes.ort_session import Kernel, OrtSession
from runtimes.precision import PRECISIONS, MemoryPrecision, Precision
from runtimes.records import to_json
from runtimes.rule import MemoryRule
from runtimes.spec import GRAPH, WEIGHTS
from xl_export import export

PRESETS: tuple[tuple[Precision, MemoryPrecision], ...] = (*((name, "fp32") for name in PRECISIONS), ("fp32", "fp16"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One preset. token: the time of one. faster: than fp32. num_bytes: of graph and weights. bytes_per_stream: of memory.

    tolerance: that its answers were held to, against PyTorch's in fp32 or the same weights' own, nats.
    """

    precision: Precision
    memory_precision: MemoryPrecision
    mem_len: int
    kernel: Kernel
    token: Timing
    faster: float
    num_bytes: int
    bytes_per_stream: int
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    kernel: Kernel = "standard",
    progress: Progress = lambda line: None,
) -> list[Row]:
    """A row for each preset, timed in turns; what is None is the configuration's own."""
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.token_repeats)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    sessions: dict[str, OrtSession] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = write_run(Path(folder) / "run", config.model, rule, random_weights(config.model))
        sizes = {}
        for preset in PRESETS:
            name = " ".join(preset)
            progress(f"weights {preset[0]}, memory {preset[1]}: exporting, with comparison against PyTorch")
            out = export(source, Path(folder) / name.replace(" ", "-"), precision=preset[0], memory_precision=preset[1])
            # the fused operator has memory in fp32
            sessions[name] = open_checked(out, threads=threads, kernel=kernel if preset[1] == "fp32" else "standard")
            sizes[name] = sum((out / file).stat().st_size for file in (GRAPH, WEIGHTS))
        progress(f"timing {repeats} tokens of each")
        times = take_turns({name: _one_token(session) for name, session in sessions.items()}, repeats=repeats)
    exact = times["fp32 fp32"].median
    return [
        Row(
            precision=session.spec.precision, memory_precision=session.spec.memory_precision, mem_len=rule.mem_len,
            kernel=session.kernel, token=times[name], faster=exact / times[name].median, num_bytes=sizes[name],
            bytes_per_stream=session.spec.bytes_per_stream, tolerance=session.spec.tolerance,
        )
        for name, session in sessions.items()
    ]  # fmt: skip


def _one_token(session: OrtSession) -> Callable[[], Any]:
    memory, token = filled(session, 1), np.zeros((1, 1), np.int64)
    return lambda: session.predict(token, memory)


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text; the least time is that of reading the artefact and a stream's memory."""
    lines = ["weights  memory  kernel    ms per token  at least  times faster  artefact, MB  stream, MB"]
    for row in rows:
        least = limits.read_milliseconds(row.num_bytes + row.bytes_per_stream)
        lines.append(
            f"{row.precision:7}  {row.memory_precision:6}  {row.kernel:8}  {row.token.median:<12.3g}  {least:<8.3g}  "
            f"{row.faster:<12.2f}  {row.num_bytes / 1e6:<12,.1f}  {row.bytes_per_stream / 1e6:,.1f}"
        )
    return lines
