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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Column, Job, Line, megabytes, number
from benchmarks.checked_sessions import agreed, fused_library, nats_apart, open_checked
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_artefact, random_run
from benchmarks.plot import draw_growing_cache
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import FUSED, GRAPH
from runtimes.sessions.onnx_runtime import OrtSession
from trainer.run.checkpoint import Run, load_run
from xl_export.artefact.export import make_spec, write_graphs

TOLERANCE = 1e-4  # nats
THREADS = 1  # of every side
KEYS = "past_key_values.0.key"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One position of a stream."""

    position: int  # tokens read before the timed ones
    mem_len: int  # tokens that the fixed memory keeps
    fixed: Timing  # one token with fixed memory
    growing: Timing  # one token with a cache of all tokens
    fixed_bytes: int  # memory tensors of one stream
    growing_bytes: int  # keys and values of the tokens so far


def run(job: Job) -> Iterator[Row]:
    """A row for each position. Nothing is timed before these answers agree:

    - the fixed side with PyTorch, by the export;
    - the growing side with the fixed side, token by token, while the fixed side has dropped nothing;
    - at every position, the growing side with ONNX Runtime's standard operators over the same cache.
    """
    mem_len = job.config.mem_len
    repeats = job.repeats(job.config.token_repeats)
    fixed = open_checked(random_artefact(job), threads=THREADS, operators="fused")
    trained = load_run(random_run(job))
    memory = _filled(fixed)
    with _growing(trained, mem_len) as (growing, _):
        _compare_from_the_start(fixed, growing, mem_len)
    for position in job.config.growing_positions:
        job.progress(f"after {position:,} tokens: comparing the operators, then timing {repeats} tokens")
        with _growing(trained, max(1, position)) as (growing, standard):
            cache = _filled(growing)
            _compare_at(growing, standard, cache, position)
            sides = {
                "fixed": _token(fixed, memory, position),
                "growing": _token(growing, cache, position),
            }
            times = take_turns(sides, repeats=repeats, rest=False, clock=time.process_time)
        yield Row(
            position=position,
            mem_len=mem_len,
            **times,
            fixed_bytes=_bytes(memory),
            growing_bytes=_bytes(cache) * position // cache.tensors[KEYS].shape[2],
        )


@contextlib.contextmanager
def _growing(trained: Run, mem_len: int) -> Iterator[tuple[OrtSession, OrtSession]]:
    """Sessions of a run that remember `mem_len` tokens: with the fused operator, and with standard ones.

    The graphs are not compared with PyTorch here, which would read the whole memory for minutes.
    """
    rule = MemoryRule(mem_len=mem_len, segment=1)
    spec = make_spec(trained, rule, "ring", "onnxruntime", "fp32", "fp32")
    library = fused_library("fused")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_graphs(spec, folder, trained, "plugin", others=(FUSED,))
        yield (
            OrtSession(spec, trained.vocab, folder / FUSED, threads=THREADS, library=library),
            OrtSession(spec, trained.vocab, folder / GRAPH, threads=THREADS),
        )


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


def _compare_from_the_start(fixed: Session, growing: Session, count: int) -> None:
    """Raises ArtefactError if the two sides differ over the tokens that both remember."""
    memories = {side: side.start(1) for side in (fixed, growing)}
    worst = 0.0
    for token in np.random.default_rng(0).integers(0, fixed.vocab.size, (count, 1, 1)):
        worst = max(worst, nats_apart(*(side.step(token, memory)[0] for side, memory in memories.items())))
    agreed(worst, TOLERANCE, "the growing cache differs from the side with fixed memory")


def _compare_at(growing: Session, standard: Session, cache: Memory, position: int) -> None:
    """Raises ArtefactError if the fused operator differs from the standard ones over the same cache."""
    token = np.zeros((1, 1), np.int64)
    answers = []
    for session in (standard, growing):
        memory = Memory(positions=np.array([position]), tensors=cache.tensors, owner=cache.owner)
        answers.append(session.step(token, memory)[0])
    agreed(nats_apart(*answers), TOLERANCE, "the growing cache differs from standard operators")


def _notes(lines: Sequence[Line]) -> list[str]:
    row, run = lines[0]
    model = run.document["model"]
    return [
        "Sampled positions: the memory is filled, and one token is timed, in CPU time of one thread. "
        f"{model['layers']} layers, D {model['d_model']}, fp32, the fused operator on both sides; the fixed "
        f"memory keeps {row['mem_len']:,} tokens, the cache keeps all."
    ]


CASE = Case(
    name="growing-cache",
    run=run,
    keys=("position", "mem_len"),
    columns=(
        Column("tokens before", "position"),
        Column("fixed memory, ms", "fixed"),
        Column("growing cache, ms", "growing"),
        Column(
            "times slower",
            lambda row, run: number(row["growing"]["median"] / row["fixed"]["median"]),
        ),
        Column("fixed memory, MB", "fixed_bytes", megabytes),
        Column("growing cache, MB", "growing_bytes", megabytes),
    ),
    notes=_notes,
    options=("config", "repeats"),
    published=lambda history: history.of("growing-cache")[-1:],  # busy machines slow both sides alike
    draw=draw_growing_cache,
)
