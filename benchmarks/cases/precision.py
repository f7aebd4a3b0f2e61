"""Each precision of weights and memory: the time of one token with full memory, the size, and the quality.

The export of a trained run measures the quality on the test text of the run. Random weights show how fast a
precision is, and nothing about its quality.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import SMALL, Case, Column, Job, file_option, megabytes
from benchmarks.checked_sessions import Operators, open_checked, step_of
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_run
from benchmarks.runs import Figures, Run
from runtimes.base.errors import ConfigError
from runtimes.base.records import from_json
from runtimes.contract.precision import Measured, MeasuredStep, MemoryPrecision, Precision, verdict
from runtimes.contract.spec import FUSED, GRAPH, WEIGHTS
from trainer.run.checkpoint import load_run
from xl_export import export

PRECISIONS: tuple[tuple[Precision, MemoryPrecision], ...] = (
    ("fp32", "fp32"),
    ("fp16", "fp32"),
    ("int8-stored", "fp32"),
    ("int8", "fp32"),
    ("int4", "fp32"),
    ("fp32", "fp16"),
    ("int8", "fp16"),
    ("int4", "fp16"),
    ("fp32", "int8"),
    ("int8", "int8"),
)
WARM_UP = 10  # tokens before the timed ones of each turn


@dataclass(frozen=True, kw_only=True)
class Row:
    """One precision with ring memory."""

    precision: Precision
    memory_precision: MemoryPrecision
    mem_len: int
    operators: Operators
    token: Timing
    #: How many times faster than weights and memory in fp32.
    speed_up: float
    #: Of graph and weights on disk.
    num_bytes: int
    bytes_per_stream: int
    #: The quality on the test text of the run; None for random weights, and for fp32.
    measured: Measured | MeasuredStep | None


def run(job: Job) -> list[Row]:
    """A row for each precision of a trained run, or of random weights; the tokens are timed in turns.

    --operators is for the precisions that have a fused graph; the others always use standard operators.
    """
    repeats = job.repeats(job.config.token_repeats)
    source = job["trained"] or random_run(job)
    sessions = []
    served = list[Operators]()
    sizes = []
    for precision, memory in PRECISIONS:
        job.progress(f"{precision} weights, {memory} memory: exporting")
        artefact = export(
            source,
            job.folder / f"{precision}-{memory}",
            rule=job.rule,
            precision=precision,
            memory_precision=memory,
        )
        served.append(job.operators if (artefact / FUSED).is_file() else "standard")
        sessions.append(open_checked(artefact, threads=job.threads, operators=served[-1]))
        sizes.append(sum((artefact / name).stat().st_size for name in (GRAPH, WEIGHTS)))
    job.progress(f"timing {repeats} tokens of each")
    sides = {str(at): step_of(session) for at, session in enumerate(sessions)}
    times = list(take_turns(sides, repeats=repeats, warmup=WARM_UP).values())
    return [
        Row(
            precision=session.spec.precision,
            memory_precision=session.spec.memory_precision,
            mem_len=job.rule.mem_len,
            operators=by,
            token=token,
            speed_up=times[0].median / token.median,
            num_bytes=size,
            bytes_per_stream=session.spec.bytes_per_stream,
            measured=session.spec.measured,
        )
        for session, by, token, size in zip(sessions, served, times, sizes, strict=True)
    ]


def _measured(row: Figures) -> Measured | None:
    """The quality of a row; None for random weights, and for fp32."""
    return from_json(Measured, row["measured"], where="the row") if row.get("measured") else None


def _bits_lost(row: Figures, run: Run) -> str:
    return f"{measured.bits_lost:+.4f}" if (measured := _measured(row)) else ""


def _verdict(row: Figures, run: Run) -> str:
    measured = _measured(row)
    return verdict(row["precision"], row["memory_precision"], measured) if measured else ""


def _size(options: dict[str, Any]) -> BenchmarkConfig:
    """The size of the run, or of --config."""
    config: BenchmarkConfig = options["config"]
    if "trained" not in options:
        return config
    if config.name != SMALL:
        raise ConfigError("--run has a size of its own; leave out --config, or leave out --run.")
    run: Path = options["trained"]
    return BenchmarkConfig.of(run.resolve().name, load_run(run).config, token_repeats=100)


CASE = Case(
    name="precision",
    run=run,
    keys=("precision", "memory_precision", "mem_len", "operators"),
    columns=(
        Column("weights", "precision"),
        Column("memory", "memory_precision"),
        Column("ms per token", "token"),
        Column("times faster than fp32", "speed_up", ".2f"),
        Column("MB on disk", "num_bytes", megabytes),
        Column("MB per stream", "bytes_per_stream", megabytes),
        Column("bits per token", "measured.bits_per_token", ".4f"),
        Column("bits lost", _bits_lost),
        Column("KL, nats", "measured.kl_nats", ".2g"),
        Column("same likeliest token", "measured.agreement", ".1%"),
        Column("", _verdict),
    ),
    notes=lambda lines: [f"Memory of {lines[0].row['mem_len']:,} tokens, random weights."],
    options=(
        "config",
        "repeats",
        "mem-len",
        "operators",
        file_option(
            "--run trained",
            "A trained run, whose quality is measured too; by default the weights are random.",
        ),
    ),
    size=_size,
    published=lambda history: [history.newest("precision", "enwik8-base", operators="fused")],
)
