"""What a server of many streams costs beside the steps of its model, and what it keeps to under load.

The server is `xl-export serve` in a process of its own, the load comes from another process over raw sockets,
and what they are compared with runs in this process. Every stream is greedy and has the tokens of `generate`;
scores are those of `evaluate`. The model has random weights and a vocabulary of ids, so that each token is an
event. Parts are chosen with --only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from benchmarks.case import (
    Case,
    Column,
    Job,
    config_option,
    minutes_option,
    number,
    only_option,
    option,
    repeats_option,
    whole,
    words,
)
from benchmarks.cases.serving.bench import Bench, Row, Sizes
from benchmarks.cases.serving.others import others
from benchmarks.cases.serving.parts import between, long_stream, overhead, resident, stall, throughput
from benchmarks.checked_sessions import open_checked
from benchmarks.models import random_artefact
from benchmarks.runs import History, Run
from benchmarks.runs import Row as Figures
from runtimes.base.errors import ArtefactError
from runtimes.base.machine import available_cpus
from xl_export.serve.core.settings import EngineSettings

PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "overhead": overhead,
    "throughput": throughput,
    "between": between,
    "long": long_stream,
    "resident": resident,
    "stall": stall,
    "others": others,
}
REPEATS = 5
PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "httptools", "websockets")
SIZES = Sizes()
SIZES_SHOWN = ("demo", "small", "enwik8-base")  # of models, in the documents


def unavailable() -> str | None:
    """Why this machine cannot measure the case; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the CPU time and the memory of another process are read from Linux"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is missing; install '.[cpu,serve]'" if missing else None


def run(job: Job) -> Iterator[Row]:
    """The rows of the chosen parts, of all when none is named. Steps are computed by the fused operator.

    --threads is for throughput, and for everything else too if it is given; otherwise everything else has the
    threads that the server chooses for itself.
    """
    artefact = random_artefact(job, ids=True)
    # Every session here and the server use the fused operator once it is built on this machine. Without this
    # line a new machine would measure standard operators, and nothing would show it.
    open_checked(artefact, threads=job.threads, operators="fused")
    bench = Bench(
        config=job.config,
        folder=job.folder,
        artefact=artefact,
        threads=job.threads,
        default_threads=job.given_threads or _default_threads(artefact),
        repeats=job.repeats(REPEATS),
        tokens=job["tokens"],
        minutes=job["minutes"],
        sizes=SIZES,
        before=job["before"],
        progress=job.progress,
    )
    for part in job.chosen(PARTS):
        yield from PARTS[part](bench)


def _default_threads(artefact: Path) -> int:
    """The threads that the server takes for an artefact where it is not told."""
    from xl_export.serve.http.base.server import Source  # needs the extra of the server

    source = Source(name=artefact.name, path=artefact, settings=EngineSettings())
    _, threads = source.open_session()
    return threads or available_cpus()


def published(history: History) -> list[Run]:
    """For each part and size the newest run that may be published, with its figures that have a target.

    The CPU time of the baseline server is shown too. Of the attacks of `stall` only the worst is shown."""
    found = []
    for part in PARTS:
        for size in SIZES_SHOWN:
            with contextlib.suppress(ArtefactError):  # not measured yet at this size
                run = history.newest("serve", size, rows=("part", (part,)))
                rows = [row for row in run.rows if row["part"] == part]
                judged = [row for row in rows if _target(row, run)]
                streams = {row["streams"] for row in judged}
                baseline = [
                    row for row in rows if row["side"] == "baseline server" and row["streams"] in streams
                ]
                rows = judged + (baseline if part == "overhead" else [])
                found.append(Run({**run.document, "rows": _worst(rows) if part == "stall" else rows}))
    return [run for run in found if run.rows]


def _worst(rows: Sequence[Figures]) -> list[Figures]:
    """For each figure of the other client, the attack that makes it largest."""
    worst: dict[str, Figures] = {}
    for row in rows:
        if ", before: " in row["side"]:  # of another checkout
            continue
        figure = row["side"].rpartition(": ")[2]
        if figure not in worst or row["figure"]["median"] > worst[figure]["figure"]["median"]:
            worst[figure] = row
    return list(worst.values())


def _target(row: Figures, run: Run) -> str:
    figure = row["figure"]
    most = row["most"]
    least = row["least"]
    if figure is None or (most is None and least is None):
        return ""
    holds = figure["median"] <= most if most is not None else figure["median"] >= least
    bound = f"at most {number(most)}" if most is not None else f"at least {number(least)}"
    return f"{bound}: {'holds' if holds else '**MISSED**'}"


def _note(row: Figures, run: Run) -> str:
    """What belongs to a figure, with its threads; or why it is missing."""
    notes = [f"skipped: {row['note']}" if row["figure"] is None else row["note"]]
    if threads := row.get("threads"):  # rows of earlier versions do not say it
        notes.append(f"{threads} thread{'s' * (threads > 1)}")
    return "; ".join(note for note in notes if note)


def _of(name: str) -> Callable[[Figures, Run], str]:
    return lambda row, run: "" if row["figure"] is None else number(row["figure"][name])


CASE = Case(
    name="serve",
    summary="a server of many streams next to the steps of its model: CPU, tokens/s, gaps, memory",
    run=run,
    keys=("part", "side", "streams", "threads"),
    columns=(
        Column("part", words("part")),
        Column("model", lambda row, run: run.document["config"]),
        Column("what", words("side")),
        Column("streams", whole("streams")),
        Column("median", _of("median")),
        Column("from", _of("fastest"), detail=True),
        Column("to", _of("slowest"), detail=True),
        Column("unit", words("unit")),
        Column("target", _target),
        Column("note", _note, detail=True),
    ),
    options=(
        config_option,
        repeats_option,
        only_option(PARTS, "Measure this part only"),
        minutes_option("Minutes of mixed load; 2 by default.", 2.0),
        option(
            "--tokens",
            "Tokens of the longest stream; 20,000 by default.",
            type=click.IntRange(1000, 1 << 24),
            default=20_000,
        ),
        option(
            "--before",
            "Another checkout of this project, which the part stall measures in turns with this one.",
            type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
        ),
    ),
    published=published,
    unavailable=unavailable,
)
