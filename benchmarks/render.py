"""The two renderers of a case's declaration: text for the terminal, and Markdown for the documents."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.case import Case, Column, Line
from benchmarks.runs import Run, sources

NARROW = 14  # characters at which the title of a column on the terminal is broken


def terminal(case: Case, run: Run, *, judged: bool) -> list[str]:
    """The table of a run, its notes, and its claims if they are `judged`."""
    lines = case.summarized([Line(row, run) for row in run.rows])
    if not lines:
        return []
    shown = filled(case.columns, lines)
    body = cells(shown, lines)
    columns = list(zip(*body, strict=True))
    heads = [
        textwrap.wrap(column.title, max(NARROW, *map(len, texts)))
        for column, texts in zip(shown, columns, strict=True)
    ]
    height = max(map(len, heads))
    heads = [[""] * (height - len(head)) + head for head in heads]
    table = [*zip(*heads, strict=True), *body]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return [*text, *notes(case, shown, lines), *(verdicts(case, lines) if judged else [])]


def markdown(case: Case, runs: Sequence[Run]) -> list[str]:
    """The table of some runs as Markdown without details, with notes, claims, and where it was measured."""
    lines = case.summarized([Line(row, run) for run in runs for row in run.rows])
    shown = filled([column for column in case.columns if not column.detail], lines)
    text = " ".join([*notes(case, shown, lines), *verdicts(case, lines)])
    titles = [column.title for column in shown]
    return markdown_table(titles, cells(shown, lines), *([text] if text else []), sources(*runs))


def filled(columns: Sequence[Column], lines: Sequence[Line]) -> list[Column]:
    """The columns that are not empty in all rows."""
    return [column for column in columns if any(column.cell(*line) for line in lines)]


def cells(columns: Sequence[Column], lines: Sequence[Line]) -> list[list[str]]:
    """The texts of a table, row by row."""
    return [[column.cell(*line) for column in columns] for line in lines]


def notes(case: Case, columns: Sequence[Column], lines: Sequence[Line]) -> list[str]:
    """The notes of a case and of the columns that are shown."""
    return [*case.notes(lines), *dict.fromkeys(column.note for column in columns if column.note)]


def verdicts(case: Case, lines: Sequence[Line]) -> list[str]:
    """What became of each claim that is made at the size of the lines."""
    config = lines[0].run.document["config"]
    return [claim.judged(lines) for claim in case.claims if claim.config in (None, config)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> list[str]:
    """A Markdown table, and after it each note as a paragraph."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for note in notes:
        lines += ["", note]
    return lines
