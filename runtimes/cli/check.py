"""`xl-export check`: whether an artefact computes here what was trained."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.cli.options import echo_json, folder_argument, json_option, threads_option
from runtimes.tasks.check import check


@click.command("check")
@folder_argument
@threads_option
@json_option
def check_command(path: Path, threads: int | None, as_json: bool) -> None:
    """Prove that the artefact at PATH computes what was trained.

    Replays the tokens in its reference.npz and compares every log-probability with the answers that PyTorch
    gave at export, or the machine that exported where weights are int8 or int4. Exit code 0 when all are within
    the tolerance of its precision, 1 when not, 2 when the artefact is damaged.
    """
    report = check(path, threads=threads)
    verdict = "passed" if report.passed else "FAILED"
    click.echo(f"{verdict}: {report.sentence}")
    click.echo(f"computed by: {report.computed_by}")
    if report.note:
        click.echo(f"note: {report.note}")
    echo_json(report.to_json(), as_json)
    if not report.passed:
        raise SystemExit(1)
