"""Tables and inline numbers of README.md and docs/, which are written from the history.

A table is between `<!-- table: CASE FILTERS -->` and `<!-- end of table -->`, each on a line of its own. An
inline number is between `<!-- number: CASE FILTERS COLUMN -->` and `<!-- end of number -->`: it has the
values of one column of that table. Filters are as in `history.newest`, with commas between
values. `columns="A;B"` chooses columns. `across="A;B"` gives a table a column for each value of A, with the
cells of B.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, load_case
from benchmarks.harness import Document, cells
from benchmarks.history import newest, source
from runtimes.base.errors import ArtefactError
from runtimes.base.files import atomic_file, read_bytes

MARKED = re.compile(
    r"^ *```.*?^ *```"  # a block of code, which stays as it is
    r"|^<!-- table: (?P<table>[^\n]+) -->\n(?:(?!<!-- table: ).)*?^<!-- end of table -->$"
    r"|(?<!`)<!-- number: (?P<number>[^\n]+?) -->[^\n]*?<!-- end of number -->",
    re.MULTILINE | re.DOTALL,
)


def update(folder: Path, history: Sequence[Document], *, write: bool) -> list[str]:
    """`PATH: NAME` of each table and number that differs from the history; `write` writes them again.

    All documents are filled before the first one is written, so that an unknown name changes nothing.
    """
    paths = [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]
    filled = {path: fill(read_bytes(path).decode("utf-8"), history) for path in paths}
    for path, (text, changed) in filled.items():
        if write and changed:
            with atomic_file(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return [
        f"{path.relative_to(folder)}: {name}" for path, (_, changed) in filled.items() for name in changed
    ]


def fill(text: str, history: Sequence[Document]) -> tuple[str, list[str]]:
    """A document's text with its tables and numbers filled, and the names of those that changed."""
    changed = list[str]()

    def filled(match: re.Match[str]) -> str:
        if name := match["table"]:
            lines = [f"<!-- table: {name} -->", "", *table(name, history), "", "<!-- end of table -->"]
            new = "\n".join(lines)
        elif name := match["number"]:
            new = f"<!-- number: {name} -->{inline_number(name, history)}<!-- end of number -->"
        else:
            return match[0]
        if new != match[0]:
            changed.append(name)
        return new

    return MARKED.sub(filled, text), changed


def table(marker: str, history: Sequence[Document]) -> list[str]:
    """The lines of a table in Markdown; raises ArtefactError if the history has no such result."""
    case, filters, words = _parsed(marker)
    chosen = {name: filters.pop(name) for name in ("columns", "across") if name in filters}
    layout = {name: ",".join(titles).split(";") for name, titles in chosen.items()}
    lines = newest(history, words[0], filters)
    columns = {name: case.COLUMNS[name] for name in layout.get("columns", case.COLUMNS)}
    titles, body = cells(columns, lines)
    if "across" in layout:
        titles, body = _across(titles, body, *layout["across"])
    text = [
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
        *(f"| {' | '.join(row)} |" for row in body),
    ]
    notes = [case.NOTE] if hasattr(case, "NOTE") else []
    documents = {id(document): document for _, document in lines}
    return [line for part in (text, notes, [source(documents.values())]) if part for line in ("", *part)][1:]


def inline_number(marker: str, history: Sequence[Document]) -> str:
    """The values of a column in a sentence, such as `485, 977 and 1,427`."""
    case, filters, (name, title) = _parsed(marker)
    _, body = cells({title: case.COLUMNS[title]}, newest(history, name, filters))
    *most, last = [row[0] for row in body]
    return f"{', '.join(most)} and {last}" if most else last


def _across(
    titles: list[str], body: list[list[str]], key: str, value: str
) -> tuple[list[str], list[list[str]]]:
    """The table with a column for each value of `key`, which has the cells of `value`."""
    key_at, value_at = titles.index(key), titles.index(value)
    others = [at for at in range(len(titles)) if at not in (key_at, value_at)]
    names = list(dict.fromkeys(row[key_at] for row in body))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in body:
        found.setdefault(tuple(row[at] for at in others), {})[row[key_at]] = row[value_at]
    return (
        [*(titles[at] for at in others), *names],
        [[*start, *(values.get(name, "") for name in names)] for start, values in found.items()],
    )


def _parsed(marker: str) -> tuple[Any, dict[str, list[str]], list[str]]:
    """The case of a marker, its filters, and its words that are not filters."""
    words = shlex.split(marker)
    filters = dict(word.split("=", 1) for word in words if "=" in word)
    plain = [word for word in words if "=" not in word]
    if plain[0] not in CASES:
        raise ArtefactError(f"a page names the case {plain[0]!r}; expected one of {', '.join(CASES)}.")
    return load_case(plain[0]), {name: value.split(",") for name, value in filters.items()}, plain
