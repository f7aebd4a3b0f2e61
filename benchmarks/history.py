"""The history of measurements: one JSON line for each result, with all that its figures depend on."""

from __future__ import annotations

import errno
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.configs import BenchmarkConfig
from benchmarks.machine import BUSY, commit, history_folder, machine_facts, versions
from benchmarks.measure import measure_limits
from benchmarks.runs import Document
from runtimes.base.files import refuse_unwritable, writing
from runtimes.base.records import to_json


def history_file(case: Case, file: Path | None) -> Path:
    """The history file, or the case's own; raises UserError if it cannot be written."""
    file = file or history_folder() / f"{case.name}.jsonl"
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(file, option="--history")
    return file


def begin(case: Case, config: BenchmarkConfig, *, threads: int) -> Document:
    """A result without rows: what its figures depend on, measured before them."""
    return {
        "case": case.name,
        "config": config.name,
        "model": to_json(config.model),
        "segment": config.segment,
        "threads": threads,
        "precision": case.precision,
        "engine": case.engine,
        "limits": to_json(measure_limits(threads)),
        "machine": machine_facts(),
        "versions": versions(),
        "commit": commit(),
    }


def measured_again(result: Document) -> Document:
    """The result with the better of its limits and new ones, since a busy moment hides a limit."""
    again = to_json(measure_limits(result["threads"]))
    return {**result, "limits": {name: max(rate, again[name]) for name, rate in result["limits"].items()}}


def with_rows(result: Document, rows: list[Any]) -> Document:
    """The result as a line of a history file. rows: dataclasses."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**result, "time": now, "rows": [to_json(row) for row in rows]}


def append(path: Path, document: Document) -> None:
    """Adds one line to a history file, whole or not at all."""
    line = (json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n").encode()
    # There is one unbuffered write, so that a kill cannot come between two halves of a line.
    with writing(path), path.open("ab", buffering=0) as stream:
        if (written := stream.write(line)) < len(line):  # the disk is full
            os.ftruncate(stream.fileno(), stream.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def title(result: Document) -> str:
    """The case, the sizes of the model and the number of threads, as one line."""
    m = result["model"]
    return (
        f"{result['case']}, {result['config']}: {m['layers']} layers, D {m['d_model']}, H {m['heads']}, K "
        f"{m['head_dim']}, FF {m['d_ff']}, segment {result['segment']}, {result['threads']} threads"
    )


def machine_lines(result: Document) -> list[str]:
    """The machine and its limits, and a note if it was busy."""
    machine = result["machine"]
    limits = result["limits"]
    engine = result["engine"]
    lines = [
        f"machine: {machine['cpu']}, {machine['cpus']} CPUs ({machine['busy_cpus']:g} busy before), {engine} "
        f"{result['versions'].get(engine, 'unknown')}; all times are medians",
        f"limits of the machine (the better of before and after): reading memory "
        f"{limits['read_bytes'] / 1e9:.0f} GB/s, fp32 products {limits['multiply_adds'] / 1e9:.0f} G "
        "multiply-adds/s",
    ]
    if machine["busy_cpus"] > BUSY * machine["cpus"]:
        lines.insert(0, "note: other processes used the CPUs; do not publish the figures of this run")
    return lines
