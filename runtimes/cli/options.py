"""Arguments and options that the commands share, and how a command prints its result."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from runtimes.base.machine import available_cpus
from runtimes.base.options import MB, Declared, declared
from runtimes.base.ranges import ANY, Range, counted
from runtimes.base.records import finite_or_null, json_text
from runtimes.base.terminal import printable
from runtimes.contract.device import AUTO, KINDS, Device

Command = TypeVar("Command", bound=Callable[..., Any])


class Number(click.FloatRange):
    """The type of every option that need not be a whole number. click's own types accept NaN, and infinity if
    a range has no upper end.
    """

    def __init__(self, allowed: Range = ANY) -> None:
        super().__init__(  # for help texts
            None if allowed.least == ANY.least else allowed.least,
            None if allowed.most == ANY.most else allowed.most,
            min_open=allowed.exclusive,
        )
        self.allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with contextlib.suppress(ValueError):
            value = float(value)
        self.allowed.check(name_of(param) if param else "the number", value)
        number: float = value
        return number


def options_of(
    *records: type, only: Collection[str] | None = None, defaults: bool = True, **types: click.ParamType
) -> Callable[[Command], Command]:
    """A decorator that gives a command the options of dataclasses, under the names of their fields.

    - only: the fields whose options the command has; None for all.
    - defaults: whether an option that is not given has the default of its field; otherwise it is None.
    - types: the types of fields that the command reads in its own way.
    """

    def decorate(command: Command) -> Command:
        found = [each for record in records for each in declared(record)]
        for each in reversed(found):  # the last decorator is the first option
            name = each.field.name
            if only is None or name in only:
                how = _how(each, types.get(name), each.field.default if defaults else None)
                command = click.option(how.pop("name"), name, help=each.option.help, **how)(command)
        return command

    return decorate


def _how(each: Declared, given: click.ParamType | None, default: Any) -> dict[str, Any]:
    """The arguments of `click.option` for a field. given: its type, if the command has its own."""
    name, unit = each.option.name, each.option.unit
    if each.kind is bool and default is None:
        return {"name": f"{name}/--no-{name.removeprefix('--')}", "default": None}
    if each.kind is bool:
        return {"name": name, "is_flag": True}
    kind: Any = given or each.kind
    if given is None and get_origin(each.kind) is Literal:
        kind = click.Choice(get_args(each.kind))
    elif given is None and each.kind is Path:
        kind = click.Path(path_type=Path)
    elif given is None and each.range.whole:
        least, most = (
            None if end == limit else int(end // unit)
            for end, limit in ((each.range.least, ANY.least), (each.range.most, ANY.most))
        )
        kind = click.IntRange(least, most)
    elif given is None and each.kind is float:
        kind = Number(each.range)
    return {
        "name": name,
        "type": kind,
        "default": default if default is None or unit == 1 else default // unit,
        "show_default": default is not None,
        "metavar": "MB" if unit == MB else None,
    }


def name_of(option: click.Parameter) -> str:
    """The name of an option as people type it, such as `--tokens`."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])


def warn_of_too_many(threads: int | None) -> None:
    """Warns on standard error where `threads` are more than the CPUs that this process may use."""
    cpus = available_cpus()
    if threads is not None and threads > cpus:
        click.echo(
            f"Warning: {threads} threads are more than the {counted(cpus, 'CPU')} that this process "
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
    help=f"What computes: {', '.join(KINDS)}. cuda:1 is the second GPU. cuda+tf32 multiplies fp32 artefacts "
    "in TensorFloat-32, which is faster and as inexact as fp16. auto takes the best that passes a small "
    "test, and says why it takes none that is installed; `xl-export devices` lists what this machine has.",
)
public_key_option = click.option(
    "--public-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Accept only an artefact that was signed with the private key of this Ed25519 key (PEM).",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as one JSON document instead of text.",
)


def show(document: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Prints the result of a command: a JSON document on one line, or lines of text.

    A number that is not finite becomes null. In a line, what does not print becomes a visible escape.
    """
    if as_json:
        click.echo(json_text(finite_or_null(document)))
        return
    for line in lines:
        click.echo(printable(line))


def text_as_progress(as_json: bool) -> AbstractContextManager[Any]:
    """A block whose text is progress if the result is printed as JSON: it then goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
