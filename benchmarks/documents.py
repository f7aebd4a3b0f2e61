"""Tables and single figures of README.md and docs/, which are written from the history.

A table is between `<!-- table: NAME -->` and `<!-- end of table -->` on lines of their own. NAME is a case
that declares `published`, or one of the short tables of `benchmarks.summaries`. A figure is inside a line,
between `<!-- figure: NAME -->` and `<!-- end of figure -->`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.render import markdown
from benchmarks.runs import History
from benchmarks.summaries import FIGURES, SUMMARIES
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import atomic_file, read_bytes

END_OF_TABLE = "<!-- end of table -->"
TABLE = re.compile(r"^<!-- table: (?P<name>\S+) -->$")
FIGURE = re.compile(r"(?<!`)<!-- figure: (?P<name>\S+) -->(?P<text>.*?)<!-- end of figure -->")
OPEN_FIGURE = re.compile(r"(?<!`)<!-- figure: (?P<name>\S+) -->")


NOTHING = "The history has no run yet: the table appears here with the first one."


def table_names() -> list[str]:
    """The names that tables may have."""
    return [*SUMMARIES, *CASES]


def table(name: str, history: History) -> list[str]:
    """The lines of a table; raises ArtefactError if the history has no run that may be published."""
    if name in SUMMARIES:
        return SUMMARIES[name](history)
    case = CASES[name]
    runs = case.published(history)
    return markdown(case, runs) if runs else [NOTHING]


def documents(folder: Path) -> Iterator[Path]:
    """README.md and every Markdown file under docs/; raises ConfigError if there is no README.md."""
    if not (folder / "README.md").is_file():
        raise ConfigError(
            f"{folder} has no README.md; run this in a checkout of xl-export, or give its folder."
        )
    yield folder / "README.md"
    yield from sorted((folder / "docs").rglob("*.md"))


def update(folder: Path, history: History, *, write: bool) -> list[str]:
    """`PATH: NAME` for each table and figure that is not what the history says; they are written anew.

    All documents are filled before the first one is written, so that an unknown name changes nothing.
    """
    filled = {
        path: fill(read_bytes(path).decode("utf-8"), history, where=str(path)) for path in documents(folder)
    }
    for path, (text, changed) in filled.items():
        if write and changed:
            with atomic_file(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return [
        f"{path.relative_to(folder)}: {name}" for path, (_, changed) in filled.items() for name in changed
    ]


def fill(text: str, history: History, *, where: str) -> tuple[str, list[str]]:
    """A document's text with its tables and figures filled, and the names of the changed ones.

    Raises ArtefactError for an unknown name, or for a marker without its end. where: names the document then.
    """
    answer = list[str]()
    changed = list[str]()
    tables = table_names()

    def figure(match: re.Match[str]) -> str:
        """The same marker with the figure that the history gives."""
        name = match["name"]
        _refuse_unknown(name, FIGURES, where)
        if match["text"] != (new := FIGURES[name](history)):
            changed.append(name)
        return f"<!-- figure: {name} -->{new}<!-- end of figure -->"

    lines = iter(text.split("\n"))
    fence = ""
    for line in lines:
        if line.lstrip().startswith(("```", "~~~")):
            mark = line.lstrip()[:3]
            fence = "" if fence == mark else fence or mark  # the other kind of fence does not end this one
        if fence:
            answer.append(line)
        elif match := TABLE.match(line.strip()):
            name = match["name"]
            _refuse_unknown(name, tables, where)
            old = _until_end(lines, name, where)
            new = ["", *table(name, history), ""]
            if new != old:
                changed.append(name)
            answer += [line, *new, END_OF_TABLE]
        else:
            if len(OPEN_FIGURE.findall(line)) > len(FIGURE.findall(line)):
                raise ArtefactError(
                    f"{where} begins a figure without `<!-- end of figure -->` on the same line; add it."
                )
            answer.append(FIGURE.sub(figure, line))
    return "\n".join(answer), changed


def _until_end(lines: Iterator[str], name: str, where: str) -> list[str]:
    """The lines before the end of a table; the end itself is taken from the iterator too."""
    old: list[str] = []
    for line in lines:
        if line.strip() == END_OF_TABLE:
            return old
        old.append(line)
    raise ArtefactError(f"{where} begins the table {name} without a line `{END_OF_TABLE}` after it; add it.")


def _refuse_unknown(name: str, known: Collection[str], where: str) -> None:
    if name not in known:
        raise ArtefactError(f"{where} names {name}, which is none of {', '.join(known)}; correct the name.")
