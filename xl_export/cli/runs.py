"""`xl-export runs`: a table and a picture that compare trainings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtimes.base.errors import UserError
from runtimes.base.files import refuse_replacing
from runtimes.base.terminal import printable
from runtimes.cli.options import json_option, show
from xl_export.plots.canvas import short_names

if TYPE_CHECKING:
    from trainer.run.history import Record


@click.command("runs")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the curves of training into this .png file."
)
@click.option(
    "--against",
    type=click.Choice(["tokens", "steps"]),
    default="tokens",
    show_default=True,
    help="What the curves of --plot are drawn against.",
)
@click.option("--force", is_flag=True, help="Replace the file of --plot if it exists.")
@json_option
def runs_command(
    paths: tuple[Path, ...], plot: Path | None, against: str, force: bool, as_json: bool
) -> None:
    """Compare the training of runs.

    RUN is the folder of a run, or a folder that holds runs. The table has a line for each run, the best
    validation first. Its scores are bits per token, and bits per byte or character of the text if that is
    known. Scores of runs with different vocabularies can only be compared by byte or character. Runs whose
    scores are of different units are listed apart, and a warning names what cannot be compared.
    """
    from trainer.run.history import read_record, runs_in

    if plot:
        from xl_export.plots.canvas import check_picture

        check_picture(plot, "--plot")
        refuse_replacing(plot, option="--plot", force=force)
    records: dict[Path, Record] = {}
    for path in paths:
        for run in runs_in(path):
            try:
                records[run] = read_record(run)
            except UserError as error:
                if run == path:  # it was asked for by its name
                    raise
                click.echo(printable(f"Warning: {error}"), err=True)
    if not records:
        raise UserError(f"none of the runs in {paths[0]} could be read; copy them again.")
    ordered = sorted(records.values(), key=_by_score)
    for warning in _warnings([record for record in ordered if record.validations]):
        click.echo(f"Warning: {warning}; compare them with `xl-export eval` on one text.", err=True)
    if plot:
        from xl_export.plots.curves import plot_curves

        plot_curves(plot, ordered, against=against)
    document = {"runs": [dataclasses.asdict(record) for record in ordered]}
    show(document, _table(ordered), as_json=as_json)


def _by_score(record: Record) -> tuple[str, float]:
    """Bits per byte come before bits per character, and those before bits per token."""
    score = record.best_bits if record.bits_per_unit is None else record.bits_per_unit
    return record.unit or "token", float("inf") if score is None else score


def _warnings(records: list[Record]) -> list[str]:
    """Why the order of these runs, which have validations, says nothing."""
    warnings = []
    if len(units := {record.unit or "token" for record in records}) > 1:
        warnings.append(
            f"these runs have scores for each {', '.join(sorted(units))}, which are not comparable"
        )
    texts = {record.held_out for record in records}
    if len(texts - {None}) > 1:
        warnings.append("these runs were validated on different texts, so their scores are not comparable")
    elif None in texts and len(records) > 1:
        warnings.append("the held-out text of some of these runs is not known, so it may differ")
    if len({record.validate_tokens for record in records}) > 1:
        warnings.append(
            "validate_tokens differs between these runs, so their validations may have scored different "
            "parts of the held-out text"
        )
    return warnings


COLUMNS: dict[str, Callable[[Record], str]] = {
    "steps": lambda record: f"{record.steps:,}" + f" of {record.planned:,}" * (record.steps < record.planned),
    "parameters": lambda record: _count(record.parameters),
    "tokens": lambda record: _count(record.tokens),
    "bits/token": lambda record: "-" if record.best_bits is None else f"{record.best_bits:.4f}",
    "at step": lambda record: "-" if record.best_step is None else f"{record.best_step:,}",
    "per unit": lambda record: (
        "-" if record.bits_per_unit is None else f"{record.bits_per_unit:.4f}/{record.unit}"
    ),
    "lr": lambda record: f"{record.learning_rate:g}",
    "tokens/s": lambda record: _count(record.tokens_per_second),
    "time": lambda record: _duration(record.seconds),
}


def _table(records: list[Record]) -> list[str]:
    """The lines of the table: names on the left, numbers on the right of their columns."""
    rows = [["run", *COLUMNS]]
    for name, record in zip(short_names(record.path for record in records), records, strict=True):
        rows.append([name, *(cell(record) for cell in COLUMNS.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _count(number: float | None) -> str:
    """A number in three digits: 41.1M."""
    if number is None:
        return "-"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours = whole // 3600
    minutes = whole // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s"
