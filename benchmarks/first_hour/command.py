"""`python -m benchmarks first-hour`: everything that a GPU can show in an hour, as one report."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.first_hour.catalogue import chosen_steps
from benchmarks.first_hour.page import counted
from runtimes.base.errors import ConfigError, UserError

MINUTES = 60.0


@click.command("first-hour")
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the report to write.")
@click.option(
    "--steps",
    metavar="NAME,…",
    help="Run these steps only, besides `machine`; * stands for any letters. By default all.",
)
@click.option("--list", "only_list", is_flag=True, help="Print the steps with their limits, and run nothing.")
@click.option(
    "--limit-minutes",
    type=float,
    default=MINUTES,
    show_default=True,
    help="How long all steps may take together; those that are left then are recorded as not run.",
)
@click.option("--resume", is_flag=True, help="Go on with the report in --out; steps that are done are kept.")
@click.option("--force", is_flag=True, help="Replace the report in --out.")
@click.option(
    "--quick",
    is_flag=True,
    help="Take tiny models in place of the published ones, to try the command itself; no time says anything "
    "then.",
)
def first_hour_command(
    out: Path | None,
    steps: str | None,
    only_list: bool,
    limit_minutes: float,
    resume: bool,
    force: bool,
    quick: bool,
) -> None:
    """Try and measure everything that needs an NVIDIA GPU, and write one report to send.

    Each step is a process with a limit of its own. A step that crashes, hangs or finds no package is a result
    of the report, and the next step begins. Models have random weights in the published shapes; nothing is
    downloaded. Without a GPU the steps that need none are run.
    """
    chosen = chosen_steps(steps)
    if only_list:
        for step in chosen:
            need = "GPU" if step.gpu else "any machine"
            click.echo(f"{step.name:<46}{step.minutes:>3g} min  {need:<12}{step.title}")
        return
    if out is None:
        raise UserError("--out is not given; give the folder of the report, such as --out report.")
    if not 0 < limit_minutes < 1e6:
        raise ConfigError(f"--limit-minutes is {limit_minutes:g}; expected a positive number of minutes.")
    if resume and force:
        raise ConfigError("--resume keeps a report and --force replaces it; give one of the two.")
    from benchmarks.first_hour.run import first_hour

    report = first_hour(
        out,
        chosen,
        limit_minutes=limit_minutes,
        quick=quick,
        resume=resume,
        force=force,
        say=lambda line: click.echo(line, err=True),
    )
    click.echo(f"{counted(report)}; read {out / 'report.md'}")
