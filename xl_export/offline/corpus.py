"""A corpus as blocks: files of lines, of JSON lines or of Parquet, cut at places that never change.

A block is what an actor scores at a time and what is finished at a time. Where it begins depends on the files
alone, and neither on the number of actors nor on what was finished before. So every call gives the same
numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import fsspec

from runtimes.base.errors import TextError, UserError, first_line
from runtimes.cli.lines import BOM, FIELDS, Format, form_of, lines_of, read_texts, to_score
from runtimes.tasks.text_rows import TextToScore

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some texts of a file.

    file: path or URL. form: of its lines; None for Parquet. start, stop: in bytes; in Parquet the number of
    the row group, and the next. line: the first line or row, from 1 on. texts: how many there are. first: the
    number of its first text in the corpus, from 1 on.
    """

    file: str
    form: Format | None
    start: int
    stop: int
    line: int
    texts: int
    first: int = 1


def list_files(patterns: str) -> list[str]:
    """The files of a path, a URL or a glob, sorted by name. Raises UserError where there is none."""
    try:
        system, path = fsspec.core.url_to_fs(patterns)
        found = [path] if system.isfile(path) else sorted(system.glob(path))
        names = [str(system.unstrip_protocol(file)) for file in found if system.isfile(file)]
        files = [name.removeprefix("file://") for name in names]
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{patterns} could not be listed: {first_line(error)}.") from error
    if not files:
        raise UserError(
            f"{patterns} names no file; give a file, or a glob in quotation marks: 'texts/*.txt'."
        )
    return files


def size_of(file: str) -> int:
    """The bytes of a file."""
    system, path = fsspec.core.url_to_fs(file)
    return int(system.size(path))


def blocks_of(file: str, form: Format | None, num_bytes: int) -> list[Block]:
    """The blocks of a file, each of at least `num_bytes` but the last; of Parquet, its row groups.

    form: of the lines; None decides by the first line that is not empty. The numbers of the texts begin at 1
    in each file; see `numbered`. Raises UserError for a file that cannot be read.
    """
    try:
        if file.endswith(".parquet"):
            return _row_groups(file)
        with fsspec.open(file, "rb") as stream:
            return _blocks_of_lines(cast(BinaryIO, stream), file, form, num_bytes)
    except OSError as error:
        raise UserError(f"{file} could not be read: {error.strerror or first_line(error)}.") from error


def numbered(files: list[list[Block]]) -> list[Block]:
    """All blocks in order, their texts numbered through the corpus."""
    blocks, first = [], 1
    for block in itertools.chain.from_iterable(files):
        blocks.append(replace(block, first=first))
        first += block.texts
    return blocks


def texts_of(block: Block) -> Iterator[TextToScore]:
    """Yields the texts of a block. One that has no id gets its number in the corpus, as `score` gives it."""
    texts = _texts_of_rows(block) if block.form is None else _texts_of_lines(block)
    for number, text in enumerate(texts, block.first):
        yield text if text.id is not None else replace(text, id=number)


def _blocks_of_lines(stream: BinaryIO, file: str, form: Format | None, num_bytes: int) -> list[Block]:
    if form is None:
        lines = (line.removeprefix(BOM).strip() for line in lines_of(stream, name=file))
        form = next((form_of(line) for line in lines if line), "lines")
        stream.seek(0)
    blocks: list[Block] = []
    start = at = texts = 0
    line = 1
    for number, raw in enumerate(lines_of(stream, name=file), 1):
        at += len(raw)
        # Empty lines of JSON are no texts; `read_texts` tells them in the same way.
        shown = raw.removeprefix(BOM) if number == 1 else raw
        texts += form == "lines" or bool(shown.decode("utf-8", "replace").strip())
        if at - start >= num_bytes:
            blocks.append(Block(file=file, form=form, start=start, stop=at, line=line, texts=texts))
            start, line, texts = at, number + 1, 0
    if at > start:
        blocks.append(Block(file=file, form=form, start=start, stop=at, line=line, texts=texts))
    return blocks


def _texts_of_lines(block: Block) -> Iterator[TextToScore]:
    with fsspec.open(block.file, "rb") as stream:
        stream.seek(block.start)
        lines = _until(cast(BinaryIO, stream), block.stop - block.start)
        yield from read_texts(lines, form=block.form, name=block.file, first=block.line)


def _until(stream: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0:
        line = stream.readline()
        if not line:
            raise TextError("a file of the corpus has become shorter; begin again with another --work.")
        num_bytes -= len(line)
        yield line


def _row_groups(file: str) -> list[Block]:
    blocks, line = [], 1
    with _parquet(file) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            blocks.append(Block(file=file, form=None, start=group, stop=group + 1, line=line, texts=rows))
            line += rows
    return blocks


def _texts_of_rows(block: Block) -> Iterator[TextToScore]:
    with _parquet(block.file) as table:
        columns = [name for name in table.schema_arrow.names if name in FIELDS]
        line = block.line
        for batch in table.iter_batches(1024, row_groups=[block.start], columns=columns):
            for row in batch.to_pylist():
                given = {name: value for name, value in row.items() if value is not None}
                yield to_score(given, f"row {line} of {block.file}")
                line += 1


def _parquet(file: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    system, path = fsspec.core.url_to_fs(file)
    try:
        return pyarrow.parquet.ParquetFile(system.open(path))
    except pyarrow.ArrowInvalid as error:
        raise TextError(f"{file} is not a Parquet file ({first_line(error)}).") from error
