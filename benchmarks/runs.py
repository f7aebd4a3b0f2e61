"""Which run of the history a table shows, and the paragraph below it that says where it was measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.configs import CONFIGS
from benchmarks.machine import BUSY
from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes

SOFTWARE = (("onnxruntime", "ONNX Runtime"), ("torch", "PyTorch"))
RENAMED = (("raw loop", "baseline loop"), ("relay", "baseline server"))  # sides of `serve` in older results
NEEDED = {"case", "time", "config", "threads", "rows", "machine", "versions"}
Figures = dict[str, Any]  # a row of a run, as the history holds it
Document = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One line of a history file: the result of one case, with all that its figures depend on."""

    document: dict[str, Any]

    @property
    def rows(self) -> list[Figures]:
        rows: list[Figures] = self.document["rows"]
        return rows

    @property
    def operators(self) -> str:
        """`fused` or `standard`: what computed the first row."""
        return operators(self.rows[0])

    def reading(self, num_bytes: float) -> float:
        """Milliseconds that reading these bytes takes at the rate that was measured in the same run."""
        return float(num_bytes / self.document["limits"]["read_bytes"] * 1e3)

    def computing(self, multiply_adds: float) -> float:
        """Milliseconds that these multiply-adds take at the rate that was measured in the same run."""
        return float(multiply_adds / self.document["limits"]["multiply_adds"] * 1e3)

    @property
    def command(self) -> str:
        """The command that measures this again."""
        document = self.document
        config = f" --config {document['config']}" if document["config"] in CONFIGS else ""
        fused = " --operators fused" if self.operators == "fused" else ""
        all_cpus = document["threads"] == document["machine"]["cpus"]
        threads = "" if all_cpus else f" --threads {document['threads']}"
        return f"`python -m benchmarks run {document['case']}{config}{fused}{threads}`"

    @property
    def day(self) -> str:
        """The date of this run."""
        return str(self.document["time"])[:10]

    @property
    def machine(self) -> str:
        """The processor, the CPUs and threads, and the versions of the packages that computed."""
        document = self.document
        known = [
            f"{title} {document['versions'][name]}"
            for name, title in SOFTWARE
            if name in document["versions"]
        ]
        cpu = document["machine"]["cpu"].replace("(R)", "").replace(" Processor", "")
        counts = ((document["machine"]["cpus"], "CPU"), (document["threads"], "thread"))
        parts = [f"{count} {what}{'s' * (count > 1)}" for count, what in counts]
        return ", ".join([cpu, *parts, *known])


def sources(*runs: Run) -> str:
    """The paragraph under a table: commands, dates, commits and machines of the measurement.

    The history has more: memory, system and rates of the machine, and all versions.
    """
    commands = dict.fromkeys(run.command for run in runs)
    days = sorted({run.day for run in runs})
    commits = dict.fromkeys(_commit(run.document.get("commit")) for run in runs)
    machines = dict.fromkeys(run.machine for run in runs)
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Measured by {', '.join(commands)} on {period} at commit {', '.join(commits)}. "
        f"Machine: {'; '.join(machines)}."
    )


@dataclass(frozen=True)
class History:
    """All runs of a folder of history files."""

    runs: tuple[Run, ...]

    @classmethod
    def load(cls, folder: Path) -> History:
        """Every line of every `.jsonl` file; raises ArtefactError where a line is not a result."""
        return cls(
            tuple(Run(document) for path in sorted(folder.glob("*.jsonl")) for document in read_results(path))
        )

    def of(self, case: str) -> list[Run]:
        """The runs of a case that have rows, the newest last, whatever they found busy."""
        found = [run for run in self.runs if run.document["case"] == case and run.rows]
        return sorted(found, key=lambda run: str(run.document["time"]))

    def newest(
        self,
        case: str,
        config: str,
        *,
        operators: str | None = None,
        threads: int | None = None,
        rows: tuple[str, Collection[Any]] | None = None,
    ) -> Run:
        """The run that tables show: the newest one of this case and configuration that
        - was computed by these operators, where a table names them,
        - has a row for each of these values of a field, where a table needs them (`rows`: field and values),
        - used so many threads; by default as many as its machine has CPUs, and
        - found at most a tenth of the CPUs busy before it began (older runs did not record this).

        Raises ArtefactError where there is none.
        """
        suitable = [
            run
            for run in self.of(case)
            if run.document["config"] == config
            and operators in (None, run.operators)
            and (rows is None or {row.get(rows[0]) for row in run.rows} >= set(rows[1]))
            and run.document["threads"] == (threads or run.document["machine"]["cpus"])
            and run.document["machine"].get("busy_cpus", 0) <= BUSY * run.document["machine"]["cpus"]
        ]
        if not suitable:
            named = f" with {operators} operators" if operators else ""
            option = f" --config {config}" if config in CONFIGS else ""
            option += f" --threads {threads}" if threads else ""
            raise ArtefactError(
                f"the history has no run of {case} at {config}{named} that can be published; "
                f"measure one with `python -m benchmarks run {case}{option}`."
            )
        return suitable[-1]


def read_results(path: Path) -> list[Document]:
    """The lines of a history file; raises ArtefactError if one is not a result."""
    documents = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            document = json.loads(line)
            fits = document.keys() >= NEEDED
        except (ValueError, AttributeError, RecursionError):
            fits = False
        if not fits:
            raise ArtefactError(
                f"line {number} of {path} is not a result of `python -m benchmarks run`; give another file."
            )
        if document["case"] == "serve":
            for row, (old, new) in itertools.product(document["rows"], RENAMED):
                row["side"] = str(row.get("side")).replace(old, new)
        documents.append(document)
    return documents


def operators(row: Figures) -> str:
    """`fused` or `standard`; a row that does not say is of the standard operators."""
    return str(row.get("operators", "standard"))


def _commit(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    return f"`{commit[:12]}`" + (" with uncommitted changes" if commit.endswith("+") else "")
