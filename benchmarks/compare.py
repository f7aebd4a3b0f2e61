"""Compares two sets of results: the medians of the same rows, and their ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, load_case
from benchmarks.harness import Document
from benchmarks.history import machine, read_results
from runtimes.base.errors import ConfigError

MIN_PREFIX_CHARACTERS = 4  # characters of a commit or date
Kind = tuple[str, str, int, str]  # case, size, threads, and the row's fields that distinguish it


def find_results(which: str, history: Path) -> list[Document]:
    """The results of a .jsonl file, or those in the history whose commit or time begins with `which`."""
    if Path(which).is_file():
        documents = read_results(Path(which))
    else:
        found = read_results(history) if len(which) >= MIN_PREFIX_CHARACTERS and history.is_file() else []
        documents = [
            d for d in found if f"{d.get('commit')}".startswith(which) or d["time"].startswith(which)
        ]
    if documents:
        return documents
    raise ConfigError(
        f"{which!r:.80} is neither a file with results nor a commit or date in {history}; give a file, or at "
        f"least {MIN_PREFIX_CHARACTERS} characters of a commit or date, such as 2026-11-21."
    )


def compare(before: Sequence[Document], after: Sequence[Document]) -> Document:
    """The changed medians, the rows without a counterpart, and warnings if machines or versions differ."""
    old, new = dict(_timings(before)), dict(_timings(after))
    changes = [
        {**_named(kind), "timing": name, "before": old[kind, name], "after": new[kind, name]}
        for kind, name in old
        if (kind, name) in new and old[kind, name] and new[kind, name]
    ]
    if not changes:
        raise ConfigError("the two have no timing in common; give results of one case, size and threads.")
    for change in changes:
        change["ratio"] = change["after"] / change["before"]
    alone = {kind: side for side, kinds in (("BEFORE", old), ("AFTER", new)) for kind, _ in kinds}
    common = {kind for kind, _ in old} & {kind for kind, _ in new}
    machines = [sorted({machine(each) for each in documents}) for documents in (before, after)]
    return {
        "changes": changes,
        "unmatched": [{**_named(kind), "only_in": alone[kind]} for kind in alone if kind not in common],
        "warnings": [f"the machines differ: {machines[0]} and {machines[1]}"] * (machines[0] != machines[1]),
    }


def lines(report: Document) -> Iterator[str]:
    """A comparison as text."""
    yield from (f"warning: {warning}" for warning in report["warnings"])
    title = ""
    for change in report["changes"]:
        if title != (title := f"{change['case']}, {change['config']}, {change['threads']} threads"):
            yield f"{title:<60}{'before':>12}{'after':>12}{'after/before':>14}"
        row = f"  {change['row']}: {change['timing']}"
        yield f"{row:<60}{change['before']:>12.4g}{change['after']:>12.4g}{change['ratio']:>14.3f}"
    for row in report["unmatched"]:
        yield f"only in {row['only_in']}: {row['case']}, {row['config']}, {row['row']}"


def _timings(documents: Sequence[Document]) -> Iterator[tuple[tuple[Kind, str], float]]:
    """The median of each timing; results are ordered by time, so the newest of a kind comes last."""
    for document in documents:
        if (case := document["case"]) in CASES:
            for row in document["rows"]:
                keys = {name: row[name] for name in load_case(case).KEYS if row.get(name) is not None}
                text = ", ".join(f"{name} {value}" for name, value in keys.items())
                for name, value in row.items():
                    if isinstance(value, dict) and "median" in value:
                        yield ((case, document["config"], document["threads"], text), name), value["median"]


def _named(kind: Kind) -> dict[str, Any]:
    return dict(zip(("case", "config", "threads", "row"), kind, strict=True))
