"""One JSON line per result, appended: how every figure of this project came to be, and on what."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.configs import BenchmarkConfig
from benchmarks.machine import commit, machine_facts, versions
from benchmarks.measure import Limits, measure_limits
from runtimes.base.files import writing
from runtimes.base.records import to_json

BUSY = 0.1  # of the CPUs
HISTORY = Path(__file__).parent / "history"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result under way: all that its figures depend on, taken before the measuring began. engine: the package that computes."""

    case: str
    config: BenchmarkConfig
    threads: int
    file: Path
    limits: Limits
    machine: dict[str, Any]
    versions: dict[str, str]
    engine: str = "onnxruntime"

    @property
    def title(self) -> str:
        m = self.config.model
        return (
            f"{self.case}, {self.config.name}: {m.layers} layers, D {m.d_model}, H {m.heads}, K {m.head_dim}, FF {m.d_ff}, "
            f"segment {self.config.segment}, {self.threads} threads"
        )

    @property
    def machine_lines(self) -> list[str]:
        machine, limits = self.machine, self.limits
        busy = machine["busy_cpus"] > BUSY * machine["cpus"]
        return [
            *(
                ["note: other jobs were using the CPUs; figures of such a run are not to be published"]
                if busy
                else []
            ),
            f"machine: {machine['cpu']}, {machine['cpus']} CPUs, {machine['busy_cpus']:g} of them busy before; medians; "
            f"{self.engine} {self.versions.get(self.engine, 'unknown')}",
            f"limits, best of before and after: memory read {limits.read_bytes / 1e9:.0f} GB/s, "
            f"fp32 matrix product {limits.multiply_adds / 1e9:.0f} G multiply-adds/s",
        ]

    def remeasured(self) -> Result:
        """The same with the machine's limits measured once more, the better of each kept: a busy moment hides a limit."""
        again = measure_limits(self.threads)
        best = Limits(
            read_bytes=max(self.limits.read_bytes, again.read_bytes),
            multiply_adds=max(self.limits.multiply_adds, again.multiply_adds),
        )
        return replace(self, limits=best)

    def finish(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Appends the rows with all they depend on to the history file, and returns that document."""
        document = {
            "case": self.case, "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "config": self.config.name,
            "model": to_json(self.config.model), "segment": self.config.segment, "threads": self.threads, "precision": "fp32",
            "engine": self.engine, "rows": rows, "limits": to_json(self.limits), "machine": self.machine,
            "versions": self.versions, "commit": commit(),
        }  # fmt: skip
        append(self.file, document)
        return document


def begin(
    case: str, config: BenchmarkConfig, *, threads: int, file: Path | None, engine: str = "onnxruntime"
) -> Result:
    """Takes down the machine and its limits, and makes sure that the history file can be written before anything is measured."""
    file, machine = _writable(file or HISTORY / f"{case}.jsonl"), _machine_at_first()
    limits = measure_limits(threads)
    return Result(
        case=case, config=config, threads=threads, file=file, limits=limits, machine=machine, versions=versions(), engine=engine
    )  # fmt: skip


@cache
def _machine_at_first() -> dict[str, Any]:
    """The machine before the first case of this process: how busy it is after that is this process's own doing."""
    return machine_facts()


def append(path: Path, document: dict[str, Any]) -> None:
    """Adds one line to a history file, whole or not at all."""
    line = (json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n").encode()
    with (
        writing(path),
        path.open("ab", buffering=0) as stream,
    ):  # one write, so that a kill cannot come between two
        if (written := stream.write(line)) < len(line):
            os.ftruncate(stream.fileno(), stream.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _writable(path: Path) -> Path:
    """The path, which a line can be added to; where there is no file yet there is none after this either."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    return path
