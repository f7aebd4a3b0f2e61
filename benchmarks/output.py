"""Results as a CSV file for a spreadsheet, and the rule that no other file is replaced by one."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, read_bytes, refuse_unwritable

FACTS = ("case", "config", "threads", "precision", "time", "commit")  # the first columns of every CSV file


def check_csv(path: Path, *, force: bool = False) -> None:
    """Raises UserError, before anything is measured, if the CSV file cannot or must not be written."""
    refuse_unwritable(path, option="--csv", suffixes=(".csv",))
    refuse_other_file(path, start=",".join(FACTS).encode(), option="--csv", force=force)


def refuse_other_file(path: Path, *, start: bytes, option: str, force: bool) -> None:
    """Raises UserError if `path` exists and does not have what `python -m benchmarks` writes near its start;
    `force` allows it.
    """
    if path.exists() and not force and start not in read_bytes(path)[:1024]:
        raise UserError(
            f"{path} exists and was not written by `python -m benchmarks {option}`; give another file name, "
            "or --force to replace it."
        )


def write_csv(path: Path, document: dict[str, Any]) -> None:
    """A line for each row of a result, and a column for each figure.

    The column of a nested figure is named as in `token.median`. A figure that a case does not have is empty.
    """
    facts = {name: document[name] for name in FACTS} | {"cpu": document["machine"]["cpu"]}
    lines = [{**facts, **dict(_flat(row))} for row in document["rows"]]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a row, with the names of nested ones joined by dots; lists have no column."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value
