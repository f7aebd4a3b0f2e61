"""Makes untrusted text safe to print: a terminal obeys control characters, and so do some readers.

Names in archives, keys of checkpoints, symbols of vocabularies and texts of a model are untrusted.
"""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO


def printable(text: str) -> str:
    """`text` on one line, with a visible escape, such as `\\x1b`, for each character that does not print."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def without_controls(text: str, *, allowed: str = "\n\t") -> str:
    """`text` with a visible escape for each control character that is not among `allowed`.

    Other characters that do not print, such as those that join the parts of an emoji, stay.
    """
    return "".join(_escape(c) if unicodedata.category(c) == "Cc" and c not in allowed else c for c in text)


class TerminalStream:
    """A text stream to a terminal that writes control characters as visible escapes.

    allowed: the control characters that pass. All other attributes are the stream's.
    """

    def __init__(self, stream: TextIO, *, allowed: str = "\n\t") -> None:
        self._stream = stream
        self._allowed = allowed

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click finds out in this way whether a stream accepts bytes
            raise TypeError(f"write() takes text and was given {type(text).__name__}")
        self._stream.write(without_controls(text, allowed=self._allowed))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
