"""Reads the lines of an input, each of which is a text or JSON: texts to score, and prompts."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from runtimes.base.errors import TextError, json_fault
from runtimes.base.files import open_file, reading
from runtimes.base.records import json_text
from runtimes.base.text import byte_lines, text_lines
from runtimes.contract.id_files import is_id_list
from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.generate import Prompt, encode_prompt
from runtimes.tasks.text_rows import TextToScore

Format = Literal["lines", "jsonl"]
FORMATS: tuple[Format, ...] = get_args(Format)
LONGEST_ID = 19  # digits
FIELDS = ("id", "text", "ids", "context", "group", "score")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line."""

    place: str
    """Name of the line in messages."""
    value: Any
    """Text of the line, or its decoded JSON."""
    form: Format
    """Form of the value: text or JSON."""


@contextlib.contextmanager
def opened(source: Path) -> Iterator[tuple[BinaryIO, str]]:
    """A file that a command reads, and its name for messages; standard input for `-`, which has none."""
    if str(source) == "-":
        yield sys.stdin.buffer, ""
        return
    with reading(source):
        stream = open_file(source)
    with stream:
        yield stream, str(source)


def read_lines(
    lines: Iterable[bytes], *, form: Format | None = None, name: str = "", first: int = 1
) -> Iterator[Line]:
    """Yields the lines of an input, such as `byte_lines` gives, one by one.

    form: `lines` for one text a line, an empty line being an empty text; `jsonl` for JSON, whose empty lines
    are skipped. None decides by the first line that is not empty: it is JSON if it is an object, a list or a
    string in quotation marks. name: of the file, for messages. first: the number of the first line.

    Raises TextError with the number of the line for one that is not UTF-8 or not of this form.
    """
    numbered: Iterator[tuple[int, str]] = enumerate(text_lines(lines, name, line=first), first)
    if form is None:
        head = []
        for pair in numbered:
            head.append(pair)
            if pair[1].strip():
                break
        form = form_of(head[-1][1].strip()) if head else "lines"
        numbered = itertools.chain(head, numbered)
    for number, text in numbered:
        place = f"line {number} of {name}" if name else f"line {number}"
        if form == "lines":
            yield Line(place=place, value=text, form=form)
        elif text.strip():
            yield Line(place=place, value=_parsed(text, place), form=form)


def read_texts(
    lines: Iterable[bytes], *, form: Format | None = None, name: str = "", first: int = 1
) -> Iterator[TextToScore]:
    """Yields the text to score of each line: a text, or JSON with the fields of an object to score.

    form, name, first: as in `read_lines`. Raises TextError as that does, and for JSON that is no text to
    score.
    """
    for line in read_lines(lines, form=form, name=name, first=first):
        if line.form == "lines":
            yield TextToScore(text=line.value, place=line.place)
        else:
            yield to_score(line.value, line.place)


def text_or_ids(data: Any, place: str) -> str | list[int]:
    """A text or token ids as they were read; raises TextError for anything else."""
    if isinstance(data, str) or is_id_list(data):
        checked: str | list[int] = data
        return checked
    raise TextError(f'{place} is neither a text nor a list of token ids; write "a text" or [3, 1, 4].')


def field_of_text(data: dict[str, Any], place: str) -> str | list[int]:
    """The text or the ids of an object in JSON; raises TextError unless it has one of them."""
    if ("text" in data) == ("ids" in data):
        raise TextError(
            f"{place} has {'both text and' if 'text' in data else 'neither text nor'} ids; give one."
        )
    if "text" in data and not isinstance(data["text"], str):
        raise TextError(f"{place} has a text that is no string; give token ids as ids.")
    if "ids" in data and not is_id_list(data["ids"]):
        raise TextError(f"{place} has ids that are no list of token ids; write a list such as [3, 1, 4].")
    return text_or_ids(data.get("text", data.get("ids")), place)


def form_of(line: str) -> Format:
    """The form of an input whose first line that is not empty is this one."""
    if line.startswith("{"):  # a mistake in it is named, and not scored as a text
        return "jsonl"
    try:
        return "jsonl" if isinstance(json.loads(line), dict | list | str) else "lines"
    except (ValueError, RecursionError):
        return "lines"


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(
            f"{place} is not JSON ({json_fault(error):.200}); write every line as JSON, or give --format "
            "lines where each line is a text."
        ) from error


def to_score(data: Any, place: str) -> TextToScore:
    """The text that an object, a string, or a list of token ids says; raises TextError for anything else."""
    if not isinstance(data, dict):
        return TextToScore(text=text_or_ids(data, place), place=place)
    if unknown := [name for name in data if name not in FIELDS]:
        raise TextError(f"{place} has the field {unknown[0]!r:.80}; expected some of {', '.join(FIELDS)}.")
    text = field_of_text(data, place)
    context = data.get("context")
    for name in ("id", "group"):  # which are printed again
        try:
            json_text(data.get(name), default=str)
        except ValueError as error:
            raise TextError(
                f"{place} has the {name} {data[name]!r:.80}, which JSON cannot hold; give a text or a number."
            ) from error
    return TextToScore(
        text=text,
        context=text_or_ids("" if context is None else context, f"the context of {place}"),
        id=data.get("id"),
        group=data.get("group"),
        score=data.get("score"),
        place=place,
    )


def read_prompts(
    texts: Iterable[str],
    ids: Iterable[str],
    file: Path | None,
    *,
    vocab: Vocab,
    form: Format | None = None,
) -> list[Prompt]:
    """All prompts of a command, in this order: texts, sequences of ids, and the lines of a file.

    form: of the file, as in `read_lines`; lines without any symbol are skipped. vocab: which must have the
    symbols and ids of the file. Raises TextError, which names the option or the line, if one cannot be
    read, or if there is none.
    """
    prompts: list[Prompt] = [*texts, *(parse_ids(text, what="--prompt-ids") for text in ids)]
    if file is not None:
        prompts += _of_file(file, vocab, form)
    if not prompts:
        raise TextError(
            "no prompt was given; give --prompt TEXT, --prompt-ids IDS, or a file with --prompts FILE."
        )
    return prompts


def parse_ids(text: str, *, what: str) -> list[int]:
    """Token ids that are written as numbers with commas or blanks between them."""
    words = text.replace(",", " ").split()
    # Python itself refuses to read a number of thousands of digits.
    numbers = all(word.isascii() and word.isdigit() and len(word) <= LONGEST_ID for word in words)
    ids = [int(word) for word in words] if numbers else []
    if not ids or not is_id_list(ids):
        raise TextError(f"{what} is {text!r:.60}; expected token ids such as 12,7,99.")
    return ids


def _of_file(file: Path, vocab: Vocab, form: Format | None) -> list[Prompt]:
    """One prompt for each line that is not empty, which the vocabulary can encode."""
    with opened(file) as (stream, name):
        lines = list(read_lines(byte_lines(stream, name), form=form, name=name))
    prompts = []
    for line in lines:
        if line.form == "lines" and not line.value.strip():
            continue
        prompt = _prompt(line)
        try:
            encode_prompt(vocab, prompt, what=line.place)
        except TextError as error:
            named = line.place in str(error)
            raise error if named else TextError(f"{line.place}: {error}") from error
        prompts.append(prompt)
    return prompts


def _prompt(line: Line) -> Prompt:
    """A prompt: a text, or in JSON a string, a list of ids, or an object with `text` or `ids`."""
    if isinstance(line.value, dict):
        if unknown := line.value.keys() - {"text", "ids"}:
            raise TextError(
                f"{line.place} has the field {min(map(str, unknown))!r:.80}; expected text or ids, which is "
                "continued."
            )
        return field_of_text(line.value, line.place)
    return text_or_ids(line.value, line.place)
