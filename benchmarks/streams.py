"""Independent streams in one batch: the time of one token for each, against the bytes that this must read.

The weights are read once for all of them and each stream's own memory once, so more streams get more tokens out of the
same weights, up to what their memories weigh.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arithmetic import step_bytes
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads, load_config
from benchmarks.kernels import open_checked
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import random_weights, write_artefact
from runtimes.memory import Memory
from runtimes.ort_session import Kernel, OrtSession
from runtimes.records import to_json
from runtimes.rule import MemoryRule

STREAMS = (1, 8, 32)
MEM_LEN = 800


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch. step: the time of one token for every stream. num_bytes: what the step cannot avoid reading."""

    streams: int
    mem_len: int
    step: Timing
    num_bytes: int
    kernel: Kernel

    @property
    def tokens_per_second(self) -> float:
        return self.streams / self.step.median * 1e3

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "tokens_per_second": self.tokens_per_second}


def run(
    config: BenchmarkConfig | str,
    *,
    streams: Sequence[int] = STREAMS,
    mem_len: int = MEM_LEN,
    threads: int | None = None,
    repeats: int | None = None,
    kernel: Kernel = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measures one token for each of so many streams whose memories are full; what is None is the configuration's own."""
    config = load_config(config) if isinstance(config, str) else config
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.token_repeats)
    rule, model = MemoryRule(mem_len=mem_len, segment=config.segment), config.model
    with tempfile.TemporaryDirectory() as folder:
        progress("exporting, with comparison against PyTorch")
        artefact = write_artefact(Path(folder), model, rule, random_weights(model), "ring")
        session = open_checked(artefact, threads=threads, kernel=kernel)
        sides = {str(count): _one_token(session, _full_memory(session, count)) for count in streams}
        progress(f"timing {repeats} steps of each batch")
        times = take_turns(sides, repeats=repeats)
    return [
        Row(
            streams=count, mem_len=mem_len, step=times[str(count)], kernel=kernel,
            num_bytes=step_bytes(model, rule, "ring", streams=count),
        )
        for count in streams
    ]  # fmt: skip


def _full_memory(session: OrtSession, streams: int) -> Memory:
    """Memory of streams that are well beyond their beginning, at different positions; its numbers are random."""
    draw, memory = np.random.default_rng(0), session.start(streams)
    for array in memory.tensors.values():
        array[:] = draw.standard_normal(array.shape, np.float32)
    memory.positions[:] = 3 * session.rule.slots + draw.integers(0, session.rule.slots, streams)
    return memory


def _one_token(session: OrtSession, memory: Memory) -> Callable[[], Any]:
    tokens = np.zeros((memory.batch, 1), np.int64)
    return lambda: session.step(tokens, memory)


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text, with the time that reading alone takes."""
    lines = ["streams  ms per step  tokens/s   times one stream's   MB read  reading, ms"]
    for row in rows:
        lines.append(
            f"{row.streams:7}  {row.step.median:<11.3g}  {row.tokens_per_second:<9,.0f}  "
            f"{row.tokens_per_second / rows[0].tokens_per_second:<19.3g}  {row.num_bytes / 1e6:<7,.0f}  "
            f"{limits.read_milliseconds(row.num_bytes):.3g}"
        )
    return lines
