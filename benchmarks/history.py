"""The history of measurements: one JSON line for each result, with all that its figures depend on."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.configs import BenchmarkConfig
from benchmarks.machine import BUSY, commit, history_folder, machine_facts, versions
from benchmarks.measure import Limits, measure_limits
from runtimes.base.files import refuse_unwritable, writing
from runtimes.base.records import to_json


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the figures of a result depend on, recorded before the measurement began."""

    case: Case
    config: BenchmarkConfig
    threads: int
    #: The history file that it will be appended to.
    file: Path
    limits: Limits
    machine: dict[str, Any]
    versions: dict[str, str]

    @property
    def title(self) -> str:
        """The case, the sizes of the model and the number of threads, as one line."""
        m = self.config.model
        return (
            f"{self.case.name}, {self.config.name}: {m.layers} layers, D {m.d_model}, H {m.heads}, K "
            f"{m.head_dim}, FF {m.d_ff}, segment {self.config.segment}, {self.threads} threads"
        )

    @property
    def machine_lines(self) -> list[str]:
        """The machine and its limits, and a note if it was busy."""
        machine = self.machine
        limits = self.limits
        lines = [
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs ({machine['busy_cpus']:g} busy before), "
            f"{self.case.engine} {self.versions.get(self.case.engine, 'unknown')}; all times are medians",
            f"limits of the machine (the better of before and after): reading memory "
            f"{limits.read_bytes / 1e9:.0f} GB/s, fp32 products {limits.multiply_adds / 1e9:.0f} G "
            "multiply-adds/s",
        ]
        if machine["busy_cpus"] > BUSY * machine["cpus"]:
            lines.insert(0, "note: other processes used the CPUs; do not publish the figures of this run")
        return lines

    def remeasured(self) -> Result:
        """The same result with the better of these limits and new ones, since a busy moment hides a limit."""
        again = measure_limits(self.threads)
        best = Limits(
            read_bytes=max(self.limits.read_bytes, again.read_bytes),
            multiply_adds=max(self.limits.multiply_adds, again.multiply_adds),
        )
        return replace(self, limits=best)

    def finish(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Appends the result with its rows to the history file, and returns it as it was written."""
        document = self.document(rows)
        append(self.file, document)
        return document

    def document(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The result with its rows, as a line of a history file."""
        return {
            "case": self.case.name,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "config": self.config.name,
            "model": to_json(self.config.model),
            "segment": self.config.segment,
            "threads": self.threads,
            "precision": self.case.precision,
            "engine": self.case.engine,
            "rows": rows,
            "limits": to_json(self.limits),
            "machine": self.machine,
            "versions": self.versions,
            "commit": commit(),
        }


def begin(case: Case, config: BenchmarkConfig, *, threads: int, file: Path | None) -> Result:
    """A result with the machine and its limits recorded. file: of the history; the case's own by default.

    Raises UserError if the history file cannot be written, before anything is measured.
    """
    file = file or history_folder() / f"{case.name}.jsonl"
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(file, option="--history")
    return Result(
        case=case,
        config=config,
        threads=threads,
        file=file,
        machine=machine_facts(),
        limits=measure_limits(threads),
        versions=versions(),
    )


def append(path: Path, document: dict[str, Any]) -> None:
    """Adds one line to a history file, whole or not at all."""
    line = (json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n").encode()
    # There is one unbuffered write, so that a kill cannot come between two halves of a line.
    with writing(path), path.open("ab", buffering=0) as stream:
        if (written := stream.write(line)) < len(line):  # the disk is full
            os.ftruncate(stream.fileno(), stream.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
