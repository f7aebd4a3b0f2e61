"""Many short texts scored by one process, by one actor of Ray Data and by two, all in one run.

The corpus is a file of token ids in blocks of equal size. The log-probabilities of all sides are compared.
The rate of actors is that from the beginning of the first block to the end of the last one, by their own
clocks: processes and sessions are open then, and `seconds` has the whole call. Each actor has one thread. Two
actors can be twice as fast only on two idle cores, so the row has the number of cores. Ray's own processes
take a part of them.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.case import Case, Column, Job, Line
from benchmarks.cases.score import draw_texts
from benchmarks.checked_sessions import agreed, open_checked
from benchmarks.models import random_artefact
from benchmarks.runs import Figures, Run
from runtimes import score_texts
from runtimes.base.errors import install
from runtimes.base.machine import available_cpus
from runtimes.contract.session import Session
from runtimes.tasks.score_texts import WINDOW

ACTORS = (1, 2)
BLOCKS = 24
LARGER = 4  # times as many texts as in the case `score`
REPEATS = 3  # each takes seconds, and twice that to start the actors
TOLERANCE = 1e-4  # nats a text, between one process and actors


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side."""

    #: 0 is one process without Ray.
    actors: int
    #: Tokens per second, the median.
    rate: float
    #: Of the whole call, in a cluster that runs.
    seconds: float
    #: This rate divided by one actor's.
    ratio: float
    tokens: int
    #: That this process may use.
    cores: int
    #: Its version.
    ray: str


def unavailable() -> str | None:
    """Why this machine cannot measure the case; None where it can."""
    if importlib.util.find_spec("ray") is None:
        return f"ray is not installed; run {install('ray')}"
    return None


def run(job: Job) -> list[Row]:
    """A row for one process and for each number of actors; every side has one thread for each actor."""
    from xl_export.offline.cluster import LOCAL, cluster

    repeats = job.repeats(min(job.config.repeats, REPEATS))
    artefact = random_artefact(job)
    session = open_checked(artefact, threads=1, operators="fused")  # as the actors do once it is built
    texts = [[0, *text.tolist()] for text in draw_texts(LARGER * job.config.texts, session.vocab.size)]
    corpus = job.folder / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    expected, one = _one_process(session, texts, repeats=repeats)
    sides: dict[int, list[tuple[float, float]]] = {actors: [] for actors in ACTORS}
    with cluster(LOCAL, cpus=max(ACTORS)):
        for repeat in range(repeats):
            job.progress(f"round {repeat + 1} of {repeats}: one actor and two")
            for actors in ACTORS:
                found, seconds, rate = _actors(artefact, corpus, actors)
                difference = float(np.abs(np.array(found) - expected).max())
                agreed(
                    difference, TOLERANCE, f"a text that {actors} actors have scored differs from one process"
                )
                sides[actors].append((rate, seconds))
    alone = median(rate for rate, _ in sides[1])
    return [
        Row(
            actors=actors,
            rate=(rate := median(rate for rate, _ in times)),
            seconds=median(seconds for _, seconds in times),
            ratio=rate / alone,
            tokens=sum(len(text) - 1 for text in texts),
            cores=available_cpus(),
            ray=version("ray"),
        )
        for actors, times in {0: one, **sides}.items()
    ]


def _one_process(
    session: Session, texts: Sequence[Sequence[int]], *, repeats: int
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """The log-probability of each text, and rate and seconds of each call."""
    times = []
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = list(score_texts(session, texts))
        seconds = time.perf_counter() - began
        times.append((sum(score.tokens for score in found) / seconds, seconds))
    return np.array([score.log_prob for score in found]), times


def _actors(artefact: Path, corpus: Path, actors: int) -> tuple[list[float], float, float]:
    """The log-probability of each text, the seconds of the call, and the rate while actors worked."""
    from xl_export.offline.cluster import facts_of, finished_units
    from xl_export.offline.corpus import blocks_of
    from xl_export.offline.score import ScoreBlock, ScoreOptions

    opened: dict[str, Any] = {"model": str(artefact), "device": "cpu", "threads": 1}
    options = asdict(ScoreOptions(window=WINDOW, as_json=True))
    settings = {**opened, "facts": facts_of(**opened), "options": options}
    blocks = blocks_of(str(corpus), None, corpus.stat().st_size // BLOCKS + 1)
    numbered = [(number, json.dumps(asdict(block))) for number, block in enumerate(blocks)]
    began = time.perf_counter()
    units = list(finished_units(numbered, ScoreBlock, settings, actors=actors, threads=1))
    seconds = time.perf_counter() - began
    lines = [
        json.loads(line)
        for unit in sorted(units, key=lambda unit: unit.number)
        for line in unit.content.decode().splitlines()[1:]  # the first line has the totals
    ]
    worked = max(unit.ended for unit in units) - min(unit.began for unit in units)
    return [line["log_prob"] for line in lines], seconds, sum(line["tokens"] for line in lines) / worked


def _side(row: Figures, run: Run) -> str:
    return {0: "one process, without Ray", 1: "one actor"}.get(row["actors"], f"{row['actors']} actors")


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    return [
        f"{row['tokens']:,} tokens, Ray {row['ray']}, one thread for each actor. Two actors reach at "
        f"most twice the rate of one; {row['cores']} cores serve them and Ray's own processes."
    ]


CASE = Case(
    name="ray",
    run=run,
    keys=("actors",),
    columns=(
        Column("side", _side),
        Column("tokens/s", "rate", ",.0f"),
        Column("times one actor", "ratio", ".2f"),
        Column("seconds of the call", "seconds"),
    ),
    notes=_notes,
    options=("config", "repeats", "mem-len"),
    published=lambda history: [history.newest("ray", "small")],
    unavailable=unavailable,
)
