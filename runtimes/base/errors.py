"""The errors that a user can fix; every other exception is a bug of this project.

Each message is one sentence that says what was given, what was expected and how to fix it. The command line
prints it without a traceback and ends with exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

from runtimes.base.progress import working


class UserError(ValueError):
    """Something given to xl-export cannot be used; the message says what and how to fix it."""


def first_line(error: BaseException) -> str:
    """The first line of the message of a library's exception, without a full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def json_fault(error: BaseException) -> str:
    """Why one line is not JSON, without the parser's own count of lines, which begins at that line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return first_line(error)


@contextmanager
def fields_as_options(*fields: str) -> Iterator[None]:
    """A block of a command, in which an error that begins with one of these fields, such as `top_p`, begins
    with the option that the user has typed, `--top-p`.
    """
    try:
        yield
    except UserError as error:
        field, _, rest = str(error).partition(" ")
        if field not in fields:
            raise
        raise UserError(f"--{field.replace('_', '-')} {rest}") from error


def of_library(error: BaseException) -> bool:
    """Whether an error comes from a library that failed, and not from Ctrl-C or the end of the process.

    A library in Rust panics with an exception that is not a subclass of Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def install(extras: str) -> str:
    """The command that installs the missing packages of some extras of xl-export, such as `cpu,export`."""
    from runtimes.base.extras import command  # reads the metadata of packages, which takes time

    return command(extras)


@contextmanager
def needs(extras: str, *packages: str) -> Iterator[None]:
    """Raises MissingPackageError, which names the command to run, if one of `packages` cannot be imported.

    The message distinguishes a package that is not installed from one that is installed and cannot be loaded.

    extras: the extras of xl-export that install them. Any other ImportError is a bug of this project and
    passes unchanged.
    """
    slow = "torch" in packages and "torch" not in sys.modules
    try:
        with working("loading PyTorch", log=False) if slow else nullcontext():
            yield
    except (ImportError, OSError) as error:  # OSError: PyTorch, if a library that it needs is missing
        if (package := absent(error)) in packages:
            raise MissingPackageError(
                f"{package} is not installed and this step needs it; run {install(extras)}."
            ) from error
        package = broken(error, packages)
        if package is None:
            raise
        raise broken_error(package, error, install=f"run {install(extras)}") from error


def absent(error: BaseException) -> str | None:
    """The package that an ImportError says is not installed; None for an error inside of a package."""
    return error.name if isinstance(error, ModuleNotFoundError) else None


def broken(error: BaseException, packages: Collection[str]) -> str | None:
    """The first of `packages` inside of which an error was raised, or that it names; None if none is."""
    names = [error.name] if isinstance(error, ImportError) and error.name else []
    frames = error.__traceback__
    while frames is not None:
        names.append(frames.tb_frame.f_globals.get("__name__") or "")
        frames = frames.tb_next
    return next((top for name in names if (top := name.partition(".")[0]) in packages), None)


def broken_error(package: str, error: Exception, *, install: str) -> MissingPackageError:
    """The error for a package that is installed and cannot be loaded, with the first line of the reason."""
    return MissingPackageError(
        f"{package} is installed and could not be loaded ({first_line(error):.300}); fix what that names, "
        f"or install another release: {install}."
    )


class ConfigError(UserError):
    """A configuration has unknown keys, wrong types or impossible sizes."""


class TextError(UserError):
    """A text is empty, not UTF-8, or has symbols outside the vocabulary."""


class ArtefactError(UserError):
    """A run, artefact or engine folder is missing a file, altered, or of another version."""


class DivergedError(ArtefactError):
    """A model's scores are not finite."""


class StreamError(UserError):
    """Memory, batch, segment or tokens do not fit the session."""


class MissingPackageError(UserError):
    """An optional package that this step needs is not installed."""
