"""How the demo prints: titles, and a table of two columns."""

from __future__ import annotations

import click

from runtimes.tasks.check import CheckReport

WIDTH = 44  # columns of what a line of the table is about


def echo_title(step: str, what: str) -> None:
    """Prints the title of a step of the demo."""
    click.echo(f"\n== {step}: {what}")


def check_line(name: str, report: CheckReport) -> str:
    """The line of the table for one check."""
    return (
        f"{f'{name} against {report.against}':<{WIDTH}}{'passed' if report.passed else 'FAILED'}: at most "
        f"{report.max_difference:.1e} nats apart"
    )
