"""What memory is worth to the model of the chorales, and what it costs.

The folder of the music holds train.jsonl and test.jsonl, lists of token ids; `examples/music/prepare.py`
writes it. All rows but the first are compared at the same events of the test part: with memory, with memory
cut to zero at each segment, and with a sliding window, which reads the last events again for each new one.
The artefact must pass its own check before it is scored or timed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Column, Job, Line, file_option
from benchmarks.cases.learning.kneser_ney import KneserNey
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing, take_turns
from benchmarks.runs import Figures, Run
from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from runtimes.tasks.check import check
from runtimes.tasks.context_losses import context_losses, spread_positions
from runtimes.tasks.evaluate import evaluate
from trainer.run.config import TrainConfig
from xl_export.demo.shipped import MUSIC, find_shipped

EVENTS = 1000
ORDER = 5
REPEATS = 40
TURNS = 4
WINDOWS = (16, 32, 64, 128, 256)  # events


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to predict the next event."""

    name: str
    #: The mean over `events` events.
    bits_per_event: float
    events: int
    #: The mean difference to reading with memory at the same events, and its standard error; None for the
    #: first two rows, the whole part and memory itself.
    more: float | None = None
    error: float | None = None
    #: To compute the distribution of one new event after all that this way remembers; None where it was not
    #: timed.
    timing: Timing | None = None
    #: SHA-256 of the files.
    parts: dict[str, str]
    #: Of the artefact.
    identity: str
    rule: MemoryRule
    precision: str


def run(job: Job) -> list[Row]:
    """A row for the whole test part with memory, and one for each way at the same 1,000 events.

    Raises ArtefactError if the artefact is missing or fails its check.
    """
    artefact = job["artefact"] or find_shipped(MUSIC)
    if artefact is None:
        raise ArtefactError(f"{MUSIC} is not there; train it as examples/music/README.md says.")
    parts = job["parts"]
    repeats = job.repeats(REPEATS)
    threads = job.given_threads
    session = open_session(artefact, threads=threads, device="cpu")
    contents = {part: read_bytes(parts / f"{part}.jsonl") for part in ("train", "test")}
    tokens = {
        part: np.concatenate([np.array(json.loads(line), np.int64) for line in content.splitlines()])
        for part, content in contents.items()
    }
    test = tokens["test"]
    longest = max(session.rule.mem_len, *WINDOWS)
    at = spread_positions(len(test), count=EVENTS, longest=longest)
    job.progress("the artefact's own check")
    if not check(artefact, threads=threads).passed:
        raise ArtefactError(f"{artefact} fails its own check, so nothing was measured; export it again.")
    job.progress(f"{len(test):,} events with memory, and {len(at):,} of them in the other ways")
    ngrams = KneserNey(tokens["train"], vocab_size=session.vocab.size, order=ORDER)
    whole = evaluate(session, test)
    nats = {
        f"memory of {session.rule.mem_len}": whole.token_nats[at - 1],
        f"memory cut to zero, segments of {session.rule.segment}": evaluate(
            session, test, carry_memory=False
        ).token_nats[at - 1],
        **{
            f"sliding window of {window}": context_losses(session, test, at, context=window)
            for window in WINDOWS
        },
        f"{ORDER}-grams, Kneser-Ney": -np.log(ngrams.probabilities(test)[at]),
    }
    job.progress(f"{repeats} new events in each way")
    times = take_turns(_next_event(session, test), repeats=repeats, warmup=3, turns=TURNS)
    facts: dict[str, Any] = {
        "parts": {f"{part}.jsonl": hashlib.sha256(content).hexdigest() for part, content in contents.items()},
        "identity": session.identity,
        "rule": session.rule,
        "precision": session.spec.precision if session.spec else "fp32",
    }
    rows = [
        Row(
            name=f"memory of {session.rule.mem_len}, the whole part",
            bits_per_event=whole.bits_per_token,
            events=len(test) - 1,
            **facts,
        )
    ]
    bits = {name: values.astype(np.float64) / math.log(2) for name, values in nats.items()}
    with_memory = next(iter(bits.values()))
    for name, values in bits.items():
        more = values - with_memory
        other = values is not with_memory
        rows.append(
            Row(
                name=name,
                bits_per_event=float(values.mean()),
                events=len(at),
                more=float(more.mean()) if other else None,
                error=float(more.std(ddof=1)) / math.sqrt(len(more)) if other else None,
                timing=times.get(name),
                **facts,
            )
        )
    return rows


def _next_event(session: Session, tokens: np.ndarray) -> dict[str, Callable[[], object]]:
    """For each way that keeps something, a call that computes the distribution of one new event."""
    full = session.start(1)
    fresh = session.start(1)
    segment = session.rule.segment
    for at in range(0, session.rule.slots + 1, segment):
        session.predict(tokens[None, at : at + segment], full)

    def with_memory() -> None:
        session.predict(tokens[None, :1], full)

    def window(length: int) -> Callable[[], object]:
        def call() -> None:
            fresh.positions[:] = 0  # an empty memory
            for at in range(0, length, segment):
                session.predict(tokens[None, at : min(at + segment, length)], fresh)

        return call

    return {
        f"memory of {session.rule.mem_len}": with_memory,
        **{f"sliding window of {length}": window(length) for length in WINDOWS},
    }


def _more(row: Figures, run: Run) -> str:
    return "" if row["more"] is None else f"{round(row['more'], 3) + 0.0:+.3f} ± {row['error']:.3f}"


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    hashes = ", ".join(f"{name} {digest[:12]}…" for name, digest in row["parts"].items())
    return [
        f"Artefact {row['identity'][:12]}…, {row['precision']}, segments of {row['rule']['segment']:,}; "
        f"SHA-256 of the parts: {hashes}."
    ]


CASE = Case(
    name="music-memory",
    run=run,
    keys=("name",),
    columns=(
        Column("read with", "name"),
        Column("events", "events"),
        Column("bits per event", "bits_per_event", ".3f"),
        Column("more than with memory", _more),
        Column("ms for a new event", "timing"),
    ),
    notes=_notes,
    options=(
        file_option(
            "--parts",
            "The folder that examples/music/prepare.py keeps next to its dataset.",
            default=Path("chorales-data-sources"),
        ),
        file_option("--artefact", "The artefact; the one in examples/music by default."),
        "repeats",
    ),
    size=lambda options: BenchmarkConfig.of("chorales", TrainConfig.load("chorales")),
    published=lambda history: history.of("music-memory")[-1:],
    precision="int8-stored",
)
