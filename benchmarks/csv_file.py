"""Results as a CSV file for a spreadsheet: one line for each row of each case, one column for each figure."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtimes.base.files import atomic_file, refuse_unwritable


def check_csv(path: Path) -> None:
    """Raises UserError, before anything is measured, where no such file can be written."""
    refuse_unwritable(path, option="--csv", suffixes=(".csv",))


def write_csv(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """The rows of the documents; a nested figure's column is named as in `token.median`, what a case lacks is empty."""
    lines = []
    for document in documents:
        facts = {
            name: document[name] for name in ("case", "config", "threads", "precision", "time", "commit")
        }
        lines += [
            {**facts, "cpu": document["machine"]["cpu"], **dict(_flat(row))} for row in document["rows"]
        ]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value
