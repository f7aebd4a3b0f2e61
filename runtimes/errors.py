"""The one family of errors that a user can cause; everything else is a bug of ours.

Each message is one sentence that says what was given, what was expected and how to mend it.
The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something given to xl-export cannot be used; the message says what and how to mend it."""


class ConfigError(UserError):
    """A configuration has unknown keys, wrong types or impossible sizes."""


class TextError(UserError):
    """A text is empty, not UTF-8, or has symbols outside the vocabulary."""


class ArtefactError(UserError):
    """A run, artefact or engine folder is missing a file, altered, or of another version."""


class StreamError(UserError):
    """Memory, batch, segment or tokens do not fit the session that they are given to."""


class MissingPackageError(UserError):
    """An optional package that this step needs is not installed."""
