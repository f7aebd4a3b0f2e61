"""One token after 0 to 100,000 others: memory of fixed size against a key/value cache that keeps every token.

Both sides have the same weights and the same kernel (the fused operator), and write keys and values in
place. For each position the growing side is the same step with room for exactly the tokens so far. So it
never copies its cache, and reads nothing that it does not need: no growing cache on this engine is faster.

Positions are sampled: the memory is filled with random numbers and one token is timed. The tokens before it
are not generated, since the cost depends on how many there are and not on which.

Every side has one thread, and times are CPU time: on a shared machine a long step is interrupted more often
than a short one, which would make the growing side look slower than it is.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checked_sessions import agreed, fused_library, nats_apart, open_checked
from benchmarks.harness import Job, Row, lengths_option, megabytes, ratio
from benchmarks.measure import take_turns, timing
from benchmarks.models import artefact_of, run_of
from benchmarks.plots import line
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import FUSED, GRAPH
from runtimes.sessions.onnx_runtime import OrtSession
from trainer.run.checkpoint import Run, load_run
from xl_export.artefact.export import make_spec, write_graphs

TOLERANCE_NATS = 1e-4
POSITIONS = (0, 1000, 10_000)
KEYS_OF_FIRST_LAYER = "past_key_values.0.key"
OPTIONS = (
    lengths_option("Numbers of tokens before the timed one; 0,1000,10000 by default.", least=0, most=1 << 20),
)


def run(job: Job) -> Iterator[Row]:
    """A row for each position. Nothing is timed before these answers agree:

    - the fixed side with PyTorch, by the export;
    - the growing side with the fixed side, token by token, while the fixed side has dropped nothing;
    - at every position, the growing side with ONNX Runtime's standard operators over the same cache.
    """
    repeats = job.repeats(job.config.token_repeats)
    fixed = open_checked(artefact_of(job), threads=1, operators="fused")
    trained = load_run(run_of(job))
    memory = _filled(fixed)
    with growing_sessions(trained, job.rule.mem_len, threads=1) as (growing, _):
        compare_from_the_start(fixed, growing, job.rule.mem_len)
    for position in job["lengths"] or POSITIONS:
        job.say(f"after {position:,} tokens: comparing the operators, then timing {repeats} tokens")
        with growing_sessions(trained, max(1, position), threads=1) as (growing, standard):
            cache = _filled(growing)
            _compare_at(growing, standard, cache, position)
            sides = {
                "fixed_ms": _token(fixed, memory, position),
                "growing_ms": _token(growing, cache, position),
            }
            times = take_turns(sides, repeats=repeats, rest=False, clock=time.process_time)
        yield {
            "position": position,
            "mem_len": job.rule.mem_len,
            **{side: timing(ms) for side, ms in times.items()},
            "fixed_bytes": _bytes(memory),
            "growing_bytes": _bytes(cache) * position // cache.tensors[KEYS_OF_FIRST_LAYER].shape[2],
        }


@contextlib.contextmanager
def growing_sessions(trained: Run, capacity: int, *, threads: int) -> Iterator[tuple[OrtSession, OrtSession]]:
    """Sessions that keep up to `capacity` tokens: with the fused operator, and with standard ones.

    The graphs are not compared with PyTorch here, which would read the whole memory for minutes.
    """
    rule = MemoryRule(mem_len=capacity, segment=1)
    spec = make_spec(trained, rule, "ring", "onnxruntime", "fp32", "fp32")
    library = fused_library("fused")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_graphs(spec, folder, trained, "plugin", others=(FUSED,))
        yield (
            OrtSession(spec, trained.vocab, folder / FUSED, threads=threads, library=library),
            OrtSession(spec, trained.vocab, folder / GRAPH, threads=threads),
        )


def compare_from_the_start(fixed: Session, growing: Session, count: int) -> None:
    """Raises ArtefactError if the two sides differ over the tokens that both remember."""
    memories = {side: side.start(1) for side in (fixed, growing)}
    worst = 0.0
    for token in np.random.default_rng(0).integers(0, fixed.vocab.size, (count, 1, 1)):
        worst = max(worst, nats_apart(*(side.step(token, memory)[0] for side, memory in memories.items())))
    agreed(worst, TOLERANCE_NATS, "the growing cache differs from the side with fixed memory")


def _compare_at(growing: Session, standard: Session, cache: Memory, position: int) -> None:
    """Raises ArtefactError if the fused operator differs from the standard ones over the same cache."""
    token = np.zeros((1, 1), np.int64)
    answers = []
    for session in (standard, growing):
        memory = Memory(positions=np.array([position]), tensors=cache.tensors, owner=cache.owner)
        answers.append(session.step(token, memory)[0])
    agreed(nats_apart(*answers), TOLERANCE_NATS, "the growing cache differs from standard operators")


def _bytes(memory: Memory) -> int:
    return sum(array.nbytes for array in memory.tensors.values())


def _filled(session: Session) -> Memory:
    """Memory full of random numbers."""
    draw = np.random.default_rng(0)
    memory = session.start(1)
    for array in memory.tensors.values():
        array[:] = draw.standard_normal(array.shape, np.float32)
    return memory


def _token(session: Session, memory: Memory, position: int) -> Callable[[], Any]:
    """One token at exactly this position, again and again."""
    token = np.zeros((1, 1), np.int64)

    def step() -> None:
        memory.positions[:] = position
        session.predict(token, memory)

    return step


def draw(figure: Any, rows: Sequence[Row]) -> str:
    """Draws milliseconds and megabytes of both sides against the number of tokens; returns the title."""
    positions = [row["position"] for row in rows]
    time_axes, size_axes = figure.subplots(1, 2)
    for side, label in (("fixed", "fixed memory"), ("growing", "growing cache")):
        ours = side == "fixed"
        line(time_axes, positions, [row[f"{side}_ms"] for row in rows], label, ours=ours)
        line(size_axes, positions, [row[f"{side}_bytes"] / 1e6 for row in rows], label, ours=ours)
    for axes, title in ((time_axes, "time per token (ms)"), (size_axes, "memory of one stream (MB)")):
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_xlabel("tokens read so far", fontsize=9)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return f"What one more token costs, after {positions[0]:,} to {positions[-1]:,} tokens"


KEYS = ("position", "mem_len")
COLUMNS = {
    "tokens before": "position",
    "fixed memory, ms": "fixed_ms",
    "growing cache, ms": "growing_ms",
    "times slower": lambda row, _: ratio(row, "growing_ms", "fixed_ms"),
    "fixed memory, MB": megabytes("fixed_bytes"),
    "growing cache, MB": megabytes("growing_bytes"),
}
NOTE = (
    "At each position, the memory is filled and one token is timed, in CPU time of one thread, with the "
    "fused operator on both sides. The cache keeps all tokens."
)
