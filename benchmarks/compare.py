"""Compares two sets of results: by how much each median changed, and which rows have no counterpart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.runs import Document, read_results
from runtimes.base.errors import ConfigError
from runtimes.base.records import to_json

SHORTEST = 4  # characters of a commit or date
MACHINE = ("cpu", "cpus", "system", "memory_bytes")
Key = tuple[str, str, int, str]  # case, configuration, threads, and what names the row


@dataclass(frozen=True, kw_only=True)
class Change:
    """One timing of one row."""

    case: str
    config: str
    threads: int
    row: str
    timing: str
    #: Medians in milliseconds; ratio: after / before.
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """One row that was left out."""

    case: str
    config: str
    threads: int
    row: str
    #: Why nothing could be compared, such as `only in BEFORE`.
    reason: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The changes, the rows that were left out, and what makes the changes doubtful."""

    changes: list[Change]
    unmatched: list[Unmatched] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The comparison as text: warnings, a table for each case, and the rows that were left out."""
        lines = [f"warning: {warning}" for warning in self.warnings]
        name = ""
        for change in self.changes:
            if name != (name := f"{change.case}, {change.config}, {change.threads} threads"):
                lines += ["", f"{name:<44}{'before, ms':>12}{'after, ms':>12}{'after/before':>14}"]
            row = f"{change.row}  {change.timing}"
            lines.append(f"  {row:<42}{change.before:>12.4g}{change.after:>12.4g}{change.ratio:>14.3f}")
        if self.unmatched:
            lines += ["", "not compared:"]
        for left in self.unmatched:
            lines.append(f"  {left.case}, {left.config}, {left.threads} threads, {left.row}: {left.reason}")
        return lines

    def to_json(self) -> Document:
        return {
            "changes": [{**to_json(change), "ratio": change.ratio} for change in self.changes],
            "unmatched": [to_json(row) for row in self.unmatched],
            "warnings": self.warnings,
        }


def find_results(which: str, folder: Path) -> list[Document]:
    """The results in a .jsonl file, or those in the folder that are of a commit or of a date.

    which: the file's path, or the beginning of a commit or of a time. Raises ConfigError where there are
    none.
    """
    if Path(which).is_file():
        if documents := read_results(Path(which)):
            return documents
        raise ConfigError(
            f"{which} is empty; give a file that `python -m benchmarks run` has appended results to."
        )
    if len(which) >= SHORTEST:
        documents = [
            document
            for path in sorted(folder.glob("*.jsonl"))
            for document in read_results(path)
            if (document.get("commit") or "").startswith(which) or str(document["time"]).startswith(which)
        ]
        if documents:
            return documents
    raise ConfigError(
        f"{which!r:.80} is neither a file nor a commit or date with results in {folder}; give a file, or at "
        f"least {SHORTEST} characters of a commit or date, such as 2026-11-21."
    )


def compare(before: Sequence[Document], after: Sequence[Document]) -> Comparison:
    """The medians of the newest row of each kind on both sides; a kind is case, configuration, threads and
    keys.

    Raises ConfigError where the two sides have no timing in common.
    """
    old = _newest(before)
    new = _newest(after)
    changes: list[Change] = []
    unmatched: list[Unmatched] = []
    warnings: list[str] = []
    for key, (row, document) in old.items():
        if key not in new:
            unmatched.append(_unmatched(key, "only in BEFORE"))
            continue
        other_row, other_document = new[key]
        timings = list(_changes(key, row, other_row))
        changes += timings
        if timings:
            warnings += _doubts(", ".join(key[:2]), document, other_document)
        else:
            unmatched.append(_unmatched(key, "has no timing on both sides"))
    unmatched += [_unmatched(key, "only in AFTER") for key in new if key not in old]
    if not changes:
        raise ConfigError(
            "the two have no timing in common; give results of the same case, configuration and threads."
        )
    changes.sort(key=lambda change: (change.case, change.config, change.threads))
    unmatched.sort(key=lambda row: (row.case, row.config, row.threads))
    return Comparison(changes=changes, unmatched=unmatched, warnings=list(dict.fromkeys(warnings)))


def _newest(documents: Sequence[Document]) -> dict[Key, tuple[Document, Document]]:
    """The newest row of each kind with its document; different runs may have measured different kinds."""
    newest: dict[Key, tuple[Document, Document]] = {}
    for document in sorted(documents, key=lambda document: str(document["time"])):
        case = str(document["case"])
        for at, row in enumerate(document["rows"]):
            key = (case, document["config"], document["threads"], _row_name(case, row, at))
            newest[key] = (row, document)
    return newest


def _row_name(case: str, row: Document, at: int) -> str:
    """What tells a row from others of its case; a row that names no operators is `standard`."""
    if case not in CASES:  # of another version of this project
        return f"row {at + 1}"
    parts = []
    for name in CASES[case].keys:
        value = row.get(name)
        if isinstance(value, dict):
            value = " ".join(f"{letter} {size}" for letter, size in value.items())
        if value not in (None, "standard"):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _changes(key: Key, row: Document, other: Document) -> Iterator[Change]:
    """A change for each timing that both rows have."""
    case, config, threads, name = key
    for timing, value in row.items():
        before = _median(value)
        after = _median(other.get(timing))
        if before > 0 and after > 0:
            yield Change(
                case=case, config=config, threads=threads, row=name, timing=timing, before=before, after=after
            )


def _median(timing: Any) -> float:
    """The median of a timing, and 0 for anything else."""
    median = timing.get("median") if isinstance(timing, dict) else None
    return float(median) if isinstance(median, int | float) else 0.0


def _unmatched(key: Key, reason: str) -> Unmatched:
    case, config, threads, row = key
    return Unmatched(case=case, config=config, threads=threads, row=row, reason=reason)


def _doubts(what: str, one: Document, other: Document) -> list[str]:
    """What differs between two results besides the code that was measured."""
    doubts = []
    machines = [document["machine"] for document in (one, other)]
    if any(machines[0].get(name) != machines[1].get(name) for name in MACHINE):
        named = " against ".join(_machine(machine) for machine in machines)
        doubts.append(f"the machines differ ({named}), so the ratios of {what} mean little")
    if machines[0].get("threads_wait") != machines[1].get("threads_wait"):
        doubts.append(
            f"PyTorch's threads waited in different ways in {what}, so its figures are not comparable"
        )
    differing = sorted(
        name
        for name in one["versions"].keys() | other["versions"].keys()
        if name != "xl-export" and one["versions"].get(name) != other["versions"].get(name)
    )
    if differing:
        doubts.append(f"the versions of {', '.join(differing)} differ in {what}")
    return doubts


def _machine(machine: Document) -> str:
    memory = machine.get("memory_bytes", 0) / 2**30
    return f"{machine.get('cpu')}, {machine.get('cpus')} CPUs, {memory:.0f} GiB"
