"""The prompts of a command: from its options, and from a file with one prompt a line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from runtimes.base.errors import TextError
from runtimes.base.files import open_file, reading
from runtimes.base.text import byte_lines
from runtimes.cli.lines import Format, Line, field_of_text, read_lines, text_or_ids
from runtimes.contract.id_files import is_id_list
from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.generate import Prompt, encode_prompt

LONGEST_ID = 19  # digits


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
    symbols and ids of the file. Raises TextError, which names the option or the line, where one cannot be
    read, or where there is none.
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
    if str(file) == "-":
        lines = _lines(sys.stdin.buffer, form, "standard input")
    else:
        with reading(file), open_file(file) as stream:
            lines = _lines(stream, form, str(file))
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


def _lines(stream: BinaryIO, form: Format | None, name: str) -> list[Line]:
    return list(read_lines(byte_lines(stream, name), form=form, name=name))


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
