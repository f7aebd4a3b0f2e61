"""The prompts of a command: from its options, and from a file with one prompt a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtimes.base.errors import TextError
from runtimes.base.files import read_bytes
from runtimes.contract.vocabulary import as_text
from runtimes.tasks.generate import Prompt

MAX_ID = 1 << 62


def read_prompts(texts: Iterable[str], ids: Iterable[str], file: Path | None) -> list[Prompt]:
    """All prompts of a command, in this order: texts, sequences of ids, and the lines of a file.

    Raises TextError, which names the option or the line, where one cannot be read, or where there is none.
    """
    prompts: list[Prompt] = [*texts, *(parse_ids(text, what="--prompt-ids") for text in ids)]
    if file is not None:
        content = sys.stdin.buffer.read() if str(file) == "-" else read_bytes(file)
        prompts += _lines(as_text(content), "standard input" if str(file) == "-" else str(file))
    if not prompts:
        raise TextError(
            "no prompt was given; give --prompt TEXT, --prompt-ids IDS, or a file with --prompts FILE."
        )
    return prompts


def parse_ids(text: str, *, what: str) -> list[int]:
    """Token ids that are written as numbers with commas or blanks between them."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and int(word) <= MAX_ID for word in words):
        raise TextError(f"{what} is {text!r:.60}; expected token ids such as 12,7,99.")
    return [int(word) for word in words]


def _lines(text: str, name: str) -> list[Prompt]:
    """One prompt for each line that is not empty; JSON where the first of them begins like JSON."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or lines[0][1].lstrip()[0] not in '{["':
        return [line.rstrip("\r") for _, line in lines]
    return [_json_prompt(line, f"line {number} of {name}") for number, line in lines]


def _json_prompt(line: str, where: str) -> Prompt:
    """A prompt in JSON: a string, a list of ids, or an object with `text` or `ids`."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(
            f"{where} is no JSON and the first line is; give one JSON value a line, or lines of plain text."
        ) from error
    if isinstance(data, dict) and len(data.keys() & {"text", "ids"}) == 1:
        data = data.get("text", data.get("ids"))
    integers = isinstance(data, list) and all(type(token) is int and 0 <= token <= MAX_ID for token in data)
    if not isinstance(data, str) and not integers:
        raise TextError(
            f'{where} is no prompt; expected a string, a list of token ids, {{"text": …}} or {{"ids": […]}}.'
        )
    prompt: Prompt = data
    return prompt
