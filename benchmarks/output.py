"""Results as a CSV file for a spreadsheet, and the rule that no other file is replaced by one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, refuse_unwritable

FACTS = ("case", "config", "threads", "precision", "time", "commit")  # the first columns of every CSV file


def check_csv(path: Path, *, force: bool = False) -> None:
    """Raises UserError, before anything is measured, where the CSV file cannot or must not be written."""
    refuse_unwritable(path, option="--csv", suffixes=(".csv",))
    refuse_other_file(path, is_own=_is_own_csv, option="--csv", force=force)


def refuse_other_file(path: Path, *, is_own: Callable[[Path], bool], option: str, force: bool) -> None:
    """Raises UserError where `path` exists and is not a file that `python -m benchmarks` wrote; `force`
    allows it.

    is_own: whether a regular file was written by this command. Anything but a regular file is always refused.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{option} is {path}, which is not a regular file; give another file name.")
    if not force and not is_own(path):
        raise UserError(
            f"{path} exists and was not written by `python -m benchmarks {option}`; give another file name, "
            "or --force to replace it."
        )


def write_csv(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """A line for each row of the documents, and a column for each figure.

    The column of a nested figure is named as in `token.median`. A figure that a case does not have is empty.
    """
    lines = []
    for document in documents:
        facts = {name: document[name] for name in FACTS}
        lines += [
            {**facts, "cpu": document["machine"]["cpu"], **dict(_flat(row))} for row in document["rows"]
        ]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(lines)


def _is_own_csv(path: Path) -> bool:
    """Whether the file begins with the columns that `write_csv` always writes first."""
    start = ",".join(FACTS).encode()
    with open(path, "rb") as stream:
        return stream.read(len(start)) == start


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a row, with the names of nested ones joined by dots; lists have no column."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value
