"""The family of errors that a user can mend; every other exception is a bug of ours.

Each message is one sentence that says what was given, what was expected and how to mend it. The command line
prints it without a traceback and ends with exit code 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something given to xl-export cannot be used; the message says what and how to mend it."""


def first_line(error: Exception) -> str:
    """The first line of the message of a library's exception, without a full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def needs(extras: str, *packages: str) -> Iterator[None]:
    """Raises MissingPackageError, which names the command to run, where one of `packages` cannot be imported.

    extras: the extras of xl-export that install them. Any other ImportError is a bug of ours and passes
    through.
    """
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in packages:
            raise
        raise MissingPackageError(
            f"{error.name} is not installed and this step needs it; run `pip install 'xl-export[{extras}]'`."
        ) from error


class ConfigError(UserError):
    """A configuration has unknown keys, wrong types or impossible sizes."""


class TextError(UserError):
    """A text is empty, not UTF-8, or has symbols outside the vocabulary."""


class ArtefactError(UserError):
    """A run, artefact or engine folder is missing a file, altered, or of another version."""


class DivergedError(ArtefactError):
    """A model's scores are not finite."""


class StreamError(UserError):
    """Memory, batch, segment or tokens do not fit the session that they are given to."""


class MissingPackageError(UserError):
    """An optional package that this step needs is not installed."""
