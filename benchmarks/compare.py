"""Compares two sets of results: by how much each median changed, and which rows have no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.runs import Document, read_results
from runtimes.base.errors import ConfigError

SHORTEST = 4  # characters of a commit or date
MACHINE = ("cpu", "cpus", "system", "memory_bytes")
Kind = tuple[str, str, int, str]  # of a row: case, size, threads, and what tells it from others of its case


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


def compare(before: Sequence[Document], after: Sequence[Document]) -> Document:
    """The medians of the newest row of each kind on both sides, rows without a counterpart, and warnings.

    Raises ConfigError if the two sides have no timing in common.
    """
    old = _newest(before)
    new = _newest(after)
    changes = []
    unmatched = [_named(kind, reason="only in AFTER") for kind in new if kind not in old]
    warnings: list[str] = []
    for kind, (row, document) in old.items():
        if kind not in new:
            unmatched.append(_named(kind, reason="only in BEFORE"))
            continue
        other_row, other_document = new[kind]
        medians = {name: (_median(value), _median(other_row.get(name))) for name, value in row.items()}
        timings = [
            _named(kind, timing=name, before=one, after=other, ratio=other / one)
            for name, (one, other) in medians.items()
            if one and other
        ]
        changes += timings
        if timings:
            warnings += _doubts(f"{kind[0]}, {kind[1]}", document, other_document)
        else:
            unmatched.append(_named(kind, reason="has no timing on both sides"))
    if not changes:
        raise ConfigError(
            "the two have no timing in common; give results of the same case, configuration and threads."
        )
    return {
        "changes": sorted(changes, key=_result),
        "unmatched": sorted(unmatched, key=lambda row: (_result(row), row["reason"] == "only in AFTER")),
        "warnings": list(dict.fromkeys(warnings)),
    }


def lines(report: Document) -> list[str]:
    """A comparison as text: warnings, a table for each case, and the rows that were left out."""
    found = [f"warning: {warning}" for warning in report["warnings"]]
    name = ""
    for change in report["changes"]:
        if name != (name := _result(change)):
            found += ["", f"{name:<44}{'before, ms':>12}{'after, ms':>12}{'after/before':>14}"]
        row = f"{change['row']}  {change['timing']}"
        found.append(f"  {row:<42}{change['before']:>12.4g}{change['after']:>12.4g}{change['ratio']:>14.3f}")
    if report["unmatched"]:
        found += ["", "not compared:"]
        found += [f"  {_result(row)}, {row['row']}: {row['reason']}" for row in report["unmatched"]]
    return found


def _named(kind: Kind, **facts: Any) -> Document:
    return {**dict(zip(("case", "config", "threads", "row"), kind, strict=True)), **facts}


def _result(row: Document) -> str:
    return f"{row['case']}, {row['config']}, {row['threads']} threads"


def _newest(documents: Sequence[Document]) -> dict[Kind, tuple[Document, Document]]:
    """The newest row of each kind with its document; different runs may have measured different kinds."""
    newest: dict[Kind, tuple[Document, Document]] = {}
    for document in sorted(documents, key=lambda document: str(document["time"])):
        case = str(document["case"])
        for row in document["rows"]:
            newest[case, document["config"], document["threads"], _row_name(case, row)] = (row, document)
    return newest


def _row_name(case: str, row: Document) -> str:
    """What tells a row from others of its case; a row that names no operators is `standard`."""
    parts = []
    for name in CASES[case].keys:
        value = row.get(name)
        if isinstance(value, dict):
            value = " ".join(f"{letter} {size}" for letter, size in value.items())
        if value not in (None, "standard"):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _median(timing: Any) -> float:
    """The median of a timing, and 0 for anything else."""
    return float(timing.get("median", 0)) if isinstance(timing, dict) else 0.0


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
