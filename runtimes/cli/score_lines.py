"""Reads texts to score from lines of text or of JSON, one after the other."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from runtimes.base.errors import TextError, first_line
from runtimes.tasks.text_rows import TextToScore

Format = Literal["lines", "jsonl"]
FORMATS: tuple[Format, ...] = get_args(Format)
FIELDS = ("id", "text", "ids", "context", "group", "score")
BOM = b"\xef\xbb\xbf"


def read_texts(lines: Iterable[bytes], *, form: Format | None = None) -> Iterator[TextToScore]:
    """Yields the text of each line of a stream.

    form: `lines` for one text a line, where an empty line is an empty text; `jsonl` for JSON, where empty
    lines are skipped. None decides by the first line that is not empty: it is JSON where it is an object, a
    list or a string in quotation marks.

    Raises TextError with the number of the line for one that is not UTF-8 or not of this form.
    """
    numbered: Iterator[tuple[int, bytes]] = enumerate(lines, 1)
    if form is None:
        form, numbered = _told_by_first(numbered)
    for number, line in numbered:
        place = f"line {number}"
        text = _decoded(line, number)
        if form == "lines":
            yield TextToScore(text=text, id=None, place=place)
        elif text.strip():
            yield _from_json(text, place)


def _told_by_first(numbered: Iterator[tuple[int, bytes]]) -> tuple[Format, Iterator[tuple[int, bytes]]]:
    """The form of the first line that is not empty, and all lines."""
    empty = []
    for number, line in numbered:
        empty.append((number, line))
        if text := line.removeprefix(BOM).strip():
            return _form_of(text), itertools.chain(empty, numbered)
    return "lines", iter(empty)


def _form_of(line: bytes) -> Format:
    try:
        return "jsonl" if isinstance(json.loads(line), dict | list | str) else "lines"
    except (ValueError, RecursionError):
        return "lines"


def _decoded(line: bytes, number: int) -> str:
    """The text of a line without its end."""
    line = line.removeprefix(BOM) if number == 1 else line
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"line {number} is not UTF-8 at byte {error.start} (0x{line[error.start]:02x}); convert the "
            "input to UTF-8."
        ) from error


def _from_json(line: str, place: str) -> TextToScore:
    """The text of one line of JSON: an object, a string, or a list of token ids."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(
            f"{place} is not JSON ({first_line(error):.200}); write every line as JSON, or give --format "
            "lines where each line is a text."
        ) from error
    if not isinstance(data, dict):
        return TextToScore(text=_text(data, place), place=place)
    if unknown := [name for name in data if name not in FIELDS]:
        raise TextError(f"{place} has the field {unknown[0]!r:.80}; expected some of {', '.join(FIELDS)}.")
    if ("text" in data) == ("ids" in data):
        raise TextError(
            f"{place} has {'both text and' if 'text' in data else 'neither text nor'} ids; give one."
        )
    if "text" in data and not isinstance(data["text"], str):
        raise TextError(f"{place} has a text that is no string; give token ids as ids.")
    score = data.get("score")
    if score is not None and not _finite(score):
        raise TextError(f"{place} has the score {score!r:.80}; expected a finite number.")
    return TextToScore(
        text=_text(data.get("text", data.get("ids")), place),
        context=_text("" if data.get("context") is None else data["context"], f"the context of {place}"),
        id=data.get("id"),
        group=data.get("group"),
        score=score,
        place=place,
    )


def _text(data: Any, place: str) -> str | list[int]:
    """A text or token ids as they were read; raises TextError for anything else."""
    if isinstance(data, str):
        return data
    if isinstance(data, list) and all(type(token) is int and abs(token) < 1 << 62 for token in data):
        return data
    raise TextError(f'{place} is neither a text nor a list of token ids; write "a text" or [3, 1, 4].')


def _finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
