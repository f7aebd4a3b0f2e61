"""What a benchmark case declares, once: how it is run, its options, its columns and its claims.

The command of the case, its table on the terminal and its table in the documents follow from the declaration.
Cells are computed from rows as the history holds them, so a new run and an old one are shown in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.configs import BenchmarkConfig, checked_minutes, checked_repeats, load_config, parse_lengths
from benchmarks.runs import History, Row, Run
from runtimes.base.records import to_json

FILE = click.Path(path_type=Path)
SMALL = "small"


class CaseRow:
    """The base of the rows that cases return: dataclasses whose fields are what the history holds."""

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


class Line(NamedTuple):
    """A row as the history holds it, and the run that measured it."""

    row: Row
    run: Run


class Column(NamedTuple):
    """A column of a table. One whose cells are all empty is left out."""

    title: str
    cell: Callable[[Row, Run], str]
    note: str = ""  # explains the column below the table
    detail: bool = False  # shown on the terminal only, and not in the documents


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A limit that a figure of the result must keep. The limit is a field of `BenchmarkConfig`.

    A claim is judged only at a size that sets the limit, with the settings of that size.
    """

    limit: str  # name of the field
    text: str  # the claim, with {limit:g}
    found: str  # what was measured, with {value}
    value: Callable[[Sequence[Line]], float | None]  # None if the figure is missing
    least: bool = False  # whether the limit is a minimum; it is a maximum otherwise

    def judged(self, lines: Sequence[Line], limit: float) -> str:
        """The claim, whether it holds, and what was measured, as one sentence after another."""
        value = self.value(lines)
        if value is None:
            return f"Claim: {self.text.format(limit=limit)}. Not measured here."
        holds = value >= limit if self.least else value <= limit
        verdict = "Holds" if holds else "**MISSED**"
        return f"Claim: {self.text.format(limit=limit)}. {verdict}: {self.found.format(value=value)}."


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case, as the `CASE` of its module."""

    name: str
    summary: str  # one line
    run: Callable[..., Sequence[CaseRow]]  # checks every side, measures, and returns rows
    keys: tuple[str, ...]  # fields that tell one row from another
    columns: tuple[Column, ...]
    options: tuple[Callable[[], click.Option], ...] = ()  # in addition to the options of every case
    claims: tuple[Claim, ...] = ()
    # Paragraphs under the table, before the notes of its columns.
    notes: Callable[[Sequence[Line]], list[str]] = lambda lines: []
    # Rows to show instead of those in the history, such as means over seeds.
    summarized: Callable[[list[Line]], list[Line]] = lambda lines: lines
    # The runs that the documents show; an empty list while there is none.
    published: Callable[[History], Sequence[Run]] = lambda history: []
    # The size to record for a case without --config, or with an option that decides it.
    size: Callable[[dict[str, Any]], BenchmarkConfig] = lambda options: options.pop("config")
    draw: Callable[[Any, Sequence[Any]], None] | None = None  # into a figure of matplotlib
    unavailable: Callable[[], str | None] = lambda: None  # why this machine cannot measure the case
    resumable: bool = False  # `run` gets earlier rows as `before`, and hands over each new one to `keep`
    engine: str = "onnxruntime"
    precision: str = "fp32"


def config_option() -> click.Option:
    """The size of the model."""
    return click.Option(
        ["--config"],
        default=SMALL,
        callback=lambda ctx, option, name: load_config(name),
        help="The size of the model: small (default), enwik8-base (some minutes), wt103-base, enwik8-large, "
        "medium, tales or demo.",
    )


def repeats_option() -> click.Option:
    """The number of timed calls."""
    return click.Option(
        ["--repeats"],
        type=int,
        callback=lambda ctx, option, value: value if value is None else checked_repeats(value, 1),
        help="Timed calls of each side; the default depends on the case and the size.",
    )


def mem_len_option() -> click.Option:
    """The length of the memory."""
    return click.Option(
        ["--mem-len"], type=int, help="Length of the memory in tokens (M); the default depends on the size."
    )


def lengths_option() -> click.Option:
    """Several lengths of attention."""
    return click.Option(
        ["--attention-lengths"],
        callback=lambda ctx, option, text: text if text is None else parse_lengths(text),
        help="Lengths in tokens, such as 64,128,256; the default depends on the size.",
    )


def operators_option() -> click.Option:
    """What computes a step."""
    return click.Option(
        ["--operators"],
        type=click.Choice(["standard", "fused"]),
        help="What computes a step: ONNX Runtime's own operators (default), or the fused operator for the "
        "CPU, which is built first.",
    )


def minutes_option(text: str) -> Callable[[], click.Option]:
    """A time; text: what it limits."""
    return lambda: click.Option(
        ["--minutes"],
        type=float,
        callback=lambda ctx, option, value: value if value is None else checked_minutes(value),
        help=text,
    )


def only_option(chosen: Callable[[Sequence[str]], object], text: str) -> Callable[[], click.Option]:
    """Names of parts of the case; chosen: raises ConfigError for a name that it does not know."""

    def known(ctx: click.Context, option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
        if names:
            chosen(names)
        return names

    return lambda: click.Option(
        ["--only", "--rows", "names"], multiple=True, callback=known, help=f"{text}; may be repeated."
    )


def file_option(name: str, text: str, **settings: Any) -> Callable[[], click.Option]:
    """A file or a folder; name: as on the command line, and of the argument if that differs."""
    return lambda: click.Option(name.split(), type=FILE, help=text, **settings)


def option(name: str, text: str, **settings: Any) -> Callable[[], click.Option]:
    """Any other option."""
    return lambda: click.Option(name.split(), help=text, **settings)


def number(value: float) -> str:
    """Three significant digits; whole numbers with separators from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def megabytes(num_bytes: float | None) -> str:
    """Millions of bytes."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 1e6:,.4g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


def whole(name: str) -> Callable[[Row, Run], str]:
    """Cells with a whole number."""
    return lambda row, run: f"{row[name]:,}"


def milliseconds(name: str, *, scale: float = 1.0) -> Callable[[Row, Run], str]:
    """Cells with the median of a timing, in milliseconds unless scaled."""
    return lambda row, run: "" if row.get(name) is None else number(row[name]["median"] * scale)


def words(name: str) -> Callable[[Row, Run], str]:
    """Cells with a value as it is; empty for None and for what a row does not have."""
    return lambda row, run: "" if row.get(name) is None else str(row[name])


def decimal(name: str, form: str = ".2f") -> Callable[[Row, Run], str]:
    """Cells with a plain number in that format."""
    return lambda row, run: "" if row.get(name) is None else format(row[name], form)
