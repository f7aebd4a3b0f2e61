"""How commands are grouped, how their help is laid out, and how their errors become one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import click

from runtimes.base.errors import UserError
from runtimes.base.ranges import Range
from runtimes.base.startup import start_command
from runtimes.base.terminal import printable
from runtimes.cli.ends import clean_up_when_terminated, stop_insisting, stopped_in_a_word, terminals_protected
from runtimes.cli.options import name_of

Sections = Mapping[str, Mapping[str, str]]
HYPHEN = "\u2011"  # one at which no line is broken


class Formatter(click.HelpFormatter):
    """Breaks no line at a hyphen, so that the name of an option stays in one piece."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **kwargs: Any) -> None:
        super().write_dl([(first, text.replace("-", HYPHEN)) for first, text in rows], *args, **kwargs)

    def getvalue(self) -> str:
        return super().getvalue().replace(HYPHEN, "-")


click.Context.formatter_class = Formatter  # of every command


class LongCommand(click.Command):
    """A command with many options, which its help shows in sections.

    sections: the names of the options of each section, the most important first. The others follow in a last
    section.
    """

    def __init__(self, *args: Any, sections: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (row := param.get_help_record(ctx)) is not None:
                rows[name_of(param)] = row
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names.split()])
        with formatter.section("Other options"):
            formatter.write_dl(list(rows.values()))


class Refusal(click.ClickException):
    """Prints one sentence on standard error and ends with exit code 2."""

    exit_code = 2

    def format_message(self) -> str:
        return printable(self.message)


class Subgroup(click.Group):
    """A group that says which of its commands was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        completing = ctx.resilient_parsing  # a shell completes the line
        given = args and not args[0].startswith("-") and not completing
        if given and self.get_command(ctx, args[0]) is None:
            visible = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
            raise Refusal(
                f"{ctx.command_path} has no command {args[0]!r}; {_meant(args[0], visible)}"
                f"`{ctx.command_path} --help` lists all of them."
            )
        return super().resolve_command(ctx, args)


class Commands(Mapping[str, click.Command]):
    """The commands of a group by name. Each is imported when it is needed, since the others take as long as
    the first token of a small model.

    places: where each is, as `pkgutil.resolve_name` reads it.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = resolve_name(self._places[name])
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Group(Subgroup):
    """A group of commands whose errors are one sentence each; a traceback is a bug of this project.

    sections: the commands under each title of the help, by name, and where each is.

    Exit codes: 2 for what cannot be used, 130 when interrupted, 143 when terminated, 129 when the terminal
    was closed. What was half written is removed in each case.
    """

    def __init__(self, *args: Any, sections: Sections = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        if sections:
            places = {name: place for section in sections.values() for name, place in section.items()}
            self.commands = Commands(places)  # type: ignore[assignment]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.sections:
            super().format_commands(ctx, formatter)
        for title, names in self.sections.items():
            rows = [(name, self.commands[name].get_short_help_str(limit=100)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        start_command()
        clean_up_when_terminated()
        try:
            with terminals_protected():
                return super().main(*args, **kwargs)
        finally:
            stop_insisting()

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:  # in the options before the command's name
            raise _refusal(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        with stopped_in_a_word():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _refusal(error) from error
        except UserError as error:
            raise Refusal(str(error)) from error
        except MemoryError as error:
            raise Refusal(
                "this machine has too little memory for that; use a smaller batch, segment or model."
            ) from error
        except UnicodeEncodeError as error:
            raise Refusal(
                f"standard output is {error.encoding} and cannot show {error.object[error.start]!r}; "
                "set PYTHONIOENCODING=utf-8."
            ) from error
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does: click ends quietly
            raise
        except OSError as error:
            what = error.filename or "standard output"
            raise Refusal(
                f"{what} cannot be used ({error.strerror or error}); give another place."
            ) from error


def _refusal(error: click.UsageError) -> click.ClickException:
    """A usage error as one sentence, with the option that was probably meant."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return error  # a command without arguments prints its help text
    path = error.ctx.command_path if error.ctx else "xl-export"
    if isinstance(error, click.NoSuchOption):
        known = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
        meant = _meant(error.option_name, [name for name in known if name.startswith("--")])
        return Refusal(f"{path} has no option {error.option_name}; {meant}`{path} --help` lists all of them.")
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        return Refusal(_missing(error.param))
    if isinstance(error, click.BadParameter) and (sentence := _no_integer(error)):
        return Refusal(sentence)
    message = " ".join(error.format_message().split()).rstrip(".")
    return Refusal(f"{message[:1].lower()}{message[1:]}; `{path} --help` says what it accepts.")


def _missing(option: click.Option) -> str:
    """One sentence for an option that was not given: the first one of its help, which is a noun, or its
    choices.
    """
    expected = (option.help or "").replace("; ", ". ").partition(". ")[0].rstrip(".")
    if isinstance(option.type, click.Choice):
        expected = f"one of {', '.join(option.type.choices)}"
    return f"{name_of(option)} is missing; add `{name_of(option)}` and {expected[:1].lower()}{expected[1:]}."


def _no_integer(error: click.BadParameter) -> str | None:
    """One sentence for what is not a whole number or is out of range, for which click has several; None for
    any other parameter.
    """
    option = error.param
    given, is_number, _ = error.message.partition(" is not ")
    if option is None or not is_number:
        return None
    kind = option.type
    if not isinstance(kind, click.types.IntParamType):
        return None
    ends = {"least": getattr(kind, "min", None), "most": getattr(kind, "max", None)}
    allowed = Range(whole=True, **{name: end for name, end in ends.items() if end is not None})
    return f"{name_of(option)} is {given:.80}; expected {allowed.expected}."


def _meant(given: str, known: list[str]) -> str:
    # Two hyphens at the beginning of all options would make any two of them look alike.
    names = {name.lstrip("-"): name for name in known}
    close = get_close_matches(given.lstrip("-"), names, n=1)
    return f"{names[close[0]]} was probably meant, and " if close else ""
