"""Tables and single figures of README.md and docs/, which are written from the history.

A table is between `<!-- table: NAME -->` and `<!-- end of table -->` on lines of their own. NAME is a case
that declares `published`, or one of the short tables of `benchmarks.summaries`. A figure is inside a line,
between `<!-- figure: NAME -->` and `<!-- end of figure -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.render import markdown
from benchmarks.runs import History
from benchmarks.summaries import FIGURES, SUMMARIES
from runtimes.base.errors import ArtefactError
from runtimes.base.files import atomic_file, read_bytes

MARKED = re.compile(
    r"^ *```.*?^ *```"  # a block of code, which stays as it is
    r"|^<!-- table: (?P<table>\S+) -->\n(?:(?!<!-- table: ).)*?^<!-- end of table -->$"
    r"|(?<!`)<!-- figure: (?P<figure>\S+) -->[^\n]*?<!-- end of figure -->",
    re.MULTILINE | re.DOTALL,
)
NOTHING = "The history has no run yet: the table appears here with the first one."


def table_names() -> list[str]:
    """The names that tables may have."""
    return [*SUMMARIES, *CASES]


def table(name: str, history: History) -> list[str]:
    """The lines of a table; raises ArtefactError if the history has no run that may be published."""
    _refuse_unknown(name, table_names())
    if name in SUMMARIES:
        return SUMMARIES[name](history)
    case = CASES[name]
    runs = case.published(history)
    return markdown(case, runs) if runs else [NOTHING]


def figure(name: str, history: History) -> str:
    """A figure for a sentence; raises ArtefactError as `table` does."""
    _refuse_unknown(name, FIGURES)
    return FIGURES[name](history)


def update(folder: Path, history: History, *, write: bool) -> list[str]:
    """`PATH: NAME` for each table and figure that is not what the history says; they are written anew.

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


def fill(text: str, history: History) -> tuple[str, list[str]]:
    """A document's text with its tables and figures filled, and the names of the changed ones."""
    changed = list[str]()

    def filled(match: re.Match[str]) -> str:
        if name := match["table"]:
            new = "\n".join(
                [f"<!-- table: {name} -->", "", *table(name, history), "", "<!-- end of table -->"]
            )
        elif name := match["figure"]:
            new = f"<!-- figure: {name} -->{figure(name, history)}<!-- end of figure -->"
        else:
            return match[0]
        if new != match[0]:
            changed.append(name)
        return new

    return MARKED.sub(filled, text), changed


def _refuse_unknown(name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ArtefactError(f"a page names {name}; expected one of {', '.join(known)}.")
