"""The two renderers of a case's declaration: text for the terminal, and Markdown for the documents."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.case import Case, Line
from benchmarks.configs import CONFIGS
from benchmarks.runs import Run, sources

NARROW = 14  # characters at which the title of a column on the terminal is broken


def terminal(case: Case, run: Run, *, judged: bool) -> list[str]:
    """The table of a run, its notes, and its claims if they are `judged`."""
    lines = case.summarized([Line(row, run) for row in run.rows])
    if not lines:
        return []
    titles, body = cells(case, lines)
    columns = list(zip(*body, strict=True))
    heads = [
        textwrap.wrap(title, max(NARROW, *map(len, column)))
        for title, column in zip(titles, columns, strict=True)
    ]
    height = max(map(len, heads))
    heads = [[""] * (height - len(head)) + head for head in heads]
    table = [*zip(*heads, strict=True), *body]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return [*text, *case.notes(lines), *(verdicts(case, lines) if judged else [])]


def markdown(case: Case, runs: Sequence[Run]) -> list[str]:
    """The table of some runs as Markdown, with notes, claims, and where it was measured."""
    lines = case.summarized([Line(row, run) for run in runs for row in run.rows])
    titles, body = cells(case, lines)
    notes = " ".join([*case.notes(lines), *verdicts(case, lines)])
    return markdown_table(titles, body, *([notes] if notes else []), sources(*runs))


def cells(case: Case, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """The titles and the cells of a table, without columns that are empty in all rows."""
    body = [[column.cell(line.row, line.run) for column in case.columns] for line in lines]
    kept = [at for at, column in enumerate(zip(*body, strict=True)) if any(column)]
    return [case.columns[at].title for at in kept], [[row[at] for at in kept] for row in body]


def verdicts(case: Case, lines: Sequence[Line]) -> list[str]:
    """What became of each claim that is made at the size of the lines."""
    config = CONFIGS.get(lines[0].run.document["config"])
    limits = [(claim, getattr(config, claim.limit, None)) for claim in case.claims]
    return [claim.judged(lines, limit) for claim, limit in limits if limit is not None]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> list[str]:
    """A Markdown table, and after it each note as a paragraph."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for note in notes:
        lines += ["", note]
    return lines
