"""Two results of the same case side by side: by how much the medians moved between commits, dates or files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases.registry import CASES
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import read_bytes
from runtimes.base.records import to_json

HISTORY = Path(__file__).parent / "history"
SHORTEST = 4  # characters of a commit or date
MACHINE = ("cpu", "cpus", "system", "memory_bytes")
Document = dict[str, Any]
Place = tuple[str, str, int, str]  # case, configuration, threads, and what names a row


@dataclass(frozen=True, kw_only=True)
class Change:
    """One timing of one row. before, after: medians in milliseconds; ratio: after / before."""

    case: str
    config: str
    threads: int
    row: str
    timing: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What can be compared, and what makes it doubtful."""

    changes: list[Change]
    warnings: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        lines = [f"warning: {warning}" for warning in self.warnings]
        name = ""
        for change in self.changes:
            if name != (name := f"{change.case}, {change.config}, {change.threads} threads"):
                lines += ["", f"{name:<44}{'before, ms':>12}{'after, ms':>12}{'after/before':>14}"]
            lines.append(
                f"  {change.row + '  ' + change.timing:<42}{change.before:>12.4g}{change.after:>12.4g}{change.ratio:>14.3f}"
            )
        return lines

    def to_json(self) -> Document:
        return {
            "changes": [{**to_json(c), "ratio": c.ratio} for c in self.changes],
            "warnings": self.warnings,
        }


def find_results(which: str, folder: Path | None = None) -> list[Document]:
    """The results of a .jsonl file, or those in the folder that are of a commit or a date; raises ConfigError for none."""
    if Path(which).is_file():
        if documents := read_results(Path(which)):
            return documents
        raise ConfigError(
            f"{which} is empty; give a file that `python -m benchmarks run` has appended results to."
        )
    folder = folder or HISTORY
    if len(which) >= SHORTEST:
        found = [
            document
            for path in sorted(folder.glob("*.jsonl"))
            for document in read_results(path)
            if (document.get("commit") or "").startswith(which) or str(document["time"]).startswith(which)
        ]
        if found:
            return found
    raise ConfigError(
        f"{which!r:.80} is neither a file nor a commit or date with results in {folder}; give two of them, at least {SHORTEST} "
        "characters each, such as 2026-11-21."
    )


def compare(before: Sequence[Document], after: Sequence[Document]) -> Comparison:
    """The newest row of each kind, by case, configuration and number of threads, on both sides.

    Raises ConfigError where the two have nothing in common.
    """
    old, new = _newest(before), _newest(after)
    changes, warnings = [], []
    for what in [what for what in old if what in new]:
        (row, one), (other_row, other) = old[what], new[what]
        found = list(_changes(what, row, other_row))
        changes += found
        warnings += _doubts(", ".join(what[:2]), one, other) if found else []
    changes.sort(key=lambda change: (change.case, change.config, change.threads))
    if not changes:
        raise ConfigError(
            "the two have no timing in common: give results of the same case, configuration and threads."
        )
    return Comparison(changes=changes, warnings=list(dict.fromkeys(warnings)))


def _newest(documents: Sequence[Document]) -> dict[Place, tuple[Document, Document]]:
    """The newest row of each kind, and the document that it is in: one run may have measured some, and another the others."""
    ordered = sorted((d for d in documents if d["case"] in CASES), key=lambda document: document["time"])
    return {
        (d["case"], d["config"], d["threads"], _key(d["case"], row)): (row, d)
        for d in ordered
        for row in d["rows"]
    }


def _changes(what: Place, row: Document, other: Document) -> Iterator[Change]:
    case, config, threads, key = what
    for timing, value in row.items():
        pair = [_median(x) for x in (value, other.get(timing))]
        if min(pair) > 0:
            yield Change(
                case=case,
                config=config,
                threads=threads,
                row=key,
                timing=timing,
                before=pair[0],
                after=pair[1],
            )


def _median(timing: Any) -> float:
    """The median of a timing, 0 for anything else."""
    median = timing.get("median") if isinstance(timing, dict) else None
    return float(median) if isinstance(median, int | float) else 0.0


def _key(case: str, row: Document) -> str:
    named = [(name.replace("_", " "), row.get(name)) for name in CASES[case].keys]
    return ", ".join(
        f"{name} {value}" for name, value in named if value not in (None, "standard")
    )  # what was not said before


def _doubts(what: str, one: Document, other: Document) -> list[str]:
    """What differs besides the code that was measured."""
    doubts = []
    machines = [document["machine"] for document in (one, other)]
    if any(machines[0].get(name) != machines[1].get(name) for name in MACHINE):
        doubts.append(
            f"the machines differ ({' against '.join(_machine(m) for m in machines)}): ratios of {what} mean little"
        )
    differing = sorted(
        name for name in one["versions"].keys() | other["versions"].keys()
        if name != "xl-export" and one["versions"].get(name) != other["versions"].get(name)
    )  # fmt: skip
    if differing:
        doubts.append(f"other versions of {', '.join(differing)} in {what}")
    return doubts


def _machine(machine: Document) -> str:
    return (
        f"{machine.get('cpu')}, {machine.get('cpus')} CPUs, {machine.get('memory_bytes', 0) / 2**30:.0f} GiB"
    )


def read_results(path: Path) -> list[Document]:
    """The lines of a history file; raises ArtefactError where one is no result."""
    documents = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            document = json.loads(line)
            facts = [
                document[name]
                for name in ("case", "time", "config", "threads", "rows", "machine", "versions")
            ]
            fits = all(isinstance(x, dict) for x in (*facts[5:], *facts[4]))
            fits = fits and isinstance(facts[3], int) and all(isinstance(x, str) for x in facts[:3])
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise ArtefactError(
                f"line {number} of {path} is not a result of `python -m benchmarks run`; give another file."
            )
        documents.append(document)
    return documents
