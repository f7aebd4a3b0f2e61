"""The page of promises names functions and tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/promises.md"
PLACE = re.compile(r"`([\w/]+\.(?:py|cpp|hpp)): (\w+)`")


def table_rows(heading: str) -> list[list[str]]:
    """The cells of every row of the tables below a heading of the second level."""
    part = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line[:2] == "| "
    ]
    return [row for row in rows if row[1] not in ("enforced by", "used in")]


@functools.cache
def defined_in(path: Path) -> set[str]:
    """Names of functions and classes of a file; for C++ all words that a parenthesis follows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cpp", ".hpp"):
        return set(re.findall(r"(\w+)\(", text))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def missing(cell: str) -> list[str]:
    places = PLACE.findall(cell)
    if not places:
        return [f"no place in {cell!r}"]
    return [
        f"{path}: {name}"
        for path, name in places
        if not (ROOT / path).is_file() or name not in defined_in(ROOT / path)
    ]


def test_every_promise_has_a_function_and_a_test_that_exist() -> None:
    rows = table_rows("Guarantees")
    assert len(rows) > 40
    assert {len(row) for row in rows} == {3}
    assert [fault for _, function, test in rows for fault in missing(function) + missing(test)] == []
    tests = [PLACE.findall(test) for _, _, test in rows]
    assert all(
        path.startswith("tests/") and name.startswith("test_") for test in tests for path, name in test
    )


def test_every_belief_says_where_it_enters() -> None:
    rows = table_rows("Assumptions")
    assert len(rows) > 10
    assert {len(row) for row in rows} == {3}
    assert [fault for _, place, _ in rows for fault in missing(place)] == []
