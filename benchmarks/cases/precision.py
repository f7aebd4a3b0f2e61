"""Each precision of weights and memory: the time of one token with full memory, the size, and the quality.

The export of a trained run (`--config RUN`) measures the quality on the test text of the run. Random weights
show how fast a precision is, and nothing about its quality.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checked_sessions import Operators, open_checked, step_of
from benchmarks.harness import OPERATORS, Column, Document, Job, Row, megabytes, number
from benchmarks.measure import take_turns, timing
from benchmarks.models import run_of
from runtimes.base.records import from_json, to_json
from runtimes.contract.precision import Measured, MemoryPrecision, Precision, verdict
from runtimes.contract.spec import FUSED, GRAPH, WEIGHTS
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
WARMUP_TOKENS = 10  # before the timed ones of each turn
OPTIONS = (OPERATORS,)


def run(job: Job) -> Iterator[Row]:
    """A row for each precision; the tokens are timed in turns.

    --operators is for the precisions that have a fused graph; the others always use standard operators.
    """
    repeats = job.repeats(job.config.token_repeats)
    source = run_of(job)
    sessions, rows = [], list[Row]()
    for precision, memory in PRECISIONS:
        job.say(f"{precision} weights, {memory} memory: exporting")
        folder = job.folder / f"{precision}-{memory}"
        artefact = export(source, folder, rule=job.rule, precision=precision, memory_precision=memory)
        operators: Operators = job.operators if (artefact / FUSED).is_file() else "standard"
        session = open_checked(artefact, threads=job.threads, operators=operators)
        sessions.append(session)
        rows.append(
            {
                "precision": precision,
                "memory_precision": memory,
                "mem_len": job.rule.mem_len,
                "operators": operators,
                "disk_bytes": sum((artefact / name).stat().st_size for name in (GRAPH, WEIGHTS)),
                "bytes_per_stream": session.spec.bytes_per_stream,
                "quality": to_json(session.spec.measured) if session.spec.measured else None,
            }
        )
    job.say(f"timing {repeats} tokens of each")
    sides = {str(at): step_of(session) for at, session in enumerate(sessions)}
    times = list(take_turns(sides, repeats=repeats, warmup=WARMUP_TOKENS).values())
    for row, ms in zip(rows, times, strict=True):
        token = timing(ms)
        yield row | {"token_ms": token, "speed_up": timing(times[0])["median"] / token["median"]}


def _quality(name: str, form: str) -> Column:
    return lambda row, _: format(row["quality"][name], form) if row.get("quality") else ""


def _bits_lost(row: Row, document: Document) -> str:
    return f"{_measured(row).bits_lost:+.4f}" if row.get("quality") else ""


def _verdict(row: Row, document: Document) -> str:
    if not row.get("quality"):
        return ""
    return verdict(row["precision"], row["memory_precision"], _measured(row))


def _measured(row: Row) -> Measured:
    return from_json(Measured, row["quality"], where="the row")


KEYS = ("precision", "memory_precision", "mem_len", "operators")
COLUMNS = {
    "weights": "precision",
    "memory": "memory_precision",
    "ms per token": "token_ms",
    "tokens/s": lambda row, _: number(1e3 / row["token_ms"]["median"]),
    "times faster than fp32": "speed_up",
    "MB on disk": megabytes("disk_bytes"),
    "MB per stream": megabytes("bytes_per_stream"),
    "bits per token": _quality("bits_per_token", ".4f"),
    "bits lost": _bits_lost,
    "KL, nats": _quality("kl_nats", ".2g"),
    "same likeliest token": _quality("agreement", ".1%"),
    "": _verdict,
}
