"""Arguments and options that the commands share, and the JSON document on the last line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from runtimes.base.machine import available_cpus
from runtimes.base.terminal import printable
from runtimes.contract.device import AUTO, KINDS, Device

Command = TypeVar("Command", bound=Callable[..., Any])


def warn_of_too_many(threads: int | None) -> None:
    """Warns on standard error where `threads` are more than the CPUs that this process may use."""
    cpus = available_cpus()
    if threads is not None and threads > cpus:
        click.echo(
            f"Warning: {threads} threads are more than the {cpus} CPU{'s' * (cpus != 1)} that this process "
            f"may use, which makes it slower; give {cpus} or fewer.",
            err=True,
        )


def _threads(ctx: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if not ctx.resilient_parsing:  # it is set for completion in a shell
        warn_of_too_many(value)
    return value


def parsed_device(ctx: click.Context, option: click.Parameter, value: str) -> Device:
    """The callback of an option whose value names a device."""
    return AUTO if ctx.resilient_parsing else Device.parse(value)


folder_argument = click.argument("path", type=click.Path(path_type=Path))


def threads_option(
    text: str = "The number of CPU threads; by default all that this process may use.",
) -> Callable[[Command], Command]:
    """The option for the number of CPU threads, with its help."""
    return click.option("--threads", type=click.IntRange(1, 1024), callback=_threads, help=text)


device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    callback=parsed_device,
    help=f"What computes: {', '.join(KINDS)}. cuda:1 is the second GPU. auto takes the best that passes a "
    "small test, and says why it takes none that is installed; `xl-export devices` lists what this machine "
    "has.",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print all figures as one JSON document on the last line of standard output.",
)


def echo(line: str) -> None:
    """Prints a line with facts of a stranger's file; what does not print becomes a visible escape."""
    click.echo(printable(line))


def echo_json(document: dict[str, Any], wanted: bool) -> None:
    """Prints the document on one line if it is wanted; a figure that is not finite becomes null."""
    if wanted:
        click.echo(json.dumps(_finite(document), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
