"""A corpus as blocks: files of lines, of JSON lines or of Parquet, cut at places that never change.

A block is what an actor scores at a time and what is finished at a time. Where it begins depends only on the
files, and not on the number of actors or on what was finished before. So every call has the same results.
Each block has the hash of its content, so that a file that has changed since is not scored.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import fsspec

from runtimes.base.errors import TextError, UserError, first_line
from runtimes.base.files import unreadable
from runtimes.base.text import TextDecoder, byte_lines, text_lines
from runtimes.cli.lines import FIELDS, Format, form_of, read_texts, to_score
from runtimes.tasks.text_rows import TextToScore

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some texts of a file."""

    file: str  # path or URL
    form: Format | None  # form of the lines; None for Parquet
    start: int  # first byte; in Parquet the number of the row group
    stop: int  # byte after the last; in Parquet the number of the next row group
    line: int  # number of the first line or row, from 1
    texts: int  # number of texts
    sha256: str  # hash of the bytes; for Parquet see `_hash_of_group`
    first: int = 1  # number of the first text in the corpus, from 1


def list_files(patterns: str) -> list[str]:
    """The files of a path, a URL or a glob, sorted by name. Raises UserError if there is none."""
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
        raise UserError(unreadable(file, error)) from error


def numbered(files: list[list[Block]]) -> list[Block]:
    """All blocks in order, their texts numbered through the corpus."""
    blocks = []
    first = 1
    for block in itertools.chain.from_iterable(files):
        blocks.append(replace(block, first=first))
        first += block.texts
    return blocks


def texts_of(block: Block) -> Iterator[TextToScore]:
    """Yields the texts of a block. A text without an id gets its number in the corpus, as in `score`.

    Raises TextError if the file is no longer what it was when the blocks were made.
    """
    texts = _texts_of_rows(block) if block.form is None else _texts_of_lines(block)
    for number, text in enumerate(texts, block.first):
        yield text if text.id is not None else replace(text, id=number)


def _blocks_of_lines(stream: BinaryIO, file: str, form: Format | None, num_bytes: int) -> list[Block]:
    if form is None:
        stripped = (line.strip() for line in text_lines(byte_lines(stream, file), file))
        form = next((form_of(line) for line in stripped if line), "lines")
        stream.seek(0)
    blocks: list[Block] = []
    start = at = texts = 0
    line = following = 1
    content = hashlib.sha256()
    decoder = TextDecoder(file)
    for raw in itertools.chain(byte_lines(stream, file), [b""]):
        at += len(raw)
        content.update(raw)
        text = decoder.decode(raw, final=not raw.endswith(b"\n"))
        lines = text.removesuffix("\n").split("\n") if text else []  # several if a single \r ends a line
        following += len(lines)
        # Empty lines of JSON are not texts; `read_texts` skips the same lines.
        texts += sum(form == "lines" or bool(shown.strip()) for shown in lines)
        if at - start >= num_bytes or (at > start and not raw):  # the last one ends with the file
            blocks.append(
                Block(
                    file=file,
                    form=form,
                    start=start,
                    stop=at,
                    line=line,
                    texts=texts,
                    sha256=content.hexdigest(),
                )
            )
            start = at
            line = following
            texts = 0
            content = hashlib.sha256()
    return blocks


def _texts_of_lines(block: Block) -> Iterator[TextToScore]:
    with fsspec.open(block.file, "rb") as stream:
        stream.seek(block.start)
        content = cast(BinaryIO, stream).read(block.stop - block.start)
    if hashlib.sha256(content).hexdigest() != block.sha256:
        raise _changed(block)
    yield from read_texts(io.BytesIO(content), form=block.form, name=block.file, first=block.line)


def _changed(block: Block) -> TextError:
    return TextError(
        f"{block.file} has changed since the call began, so its texts do not belong with the other blocks; "
        "begin again with another --work."
    )


def _row_groups(file: str) -> list[Block]:
    blocks = []
    line = 1
    with _parquet(file) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            span = {"start": group, "stop": group + 1, "line": line, "texts": rows}
            blocks.append(Block(file=file, form=None, sha256=_hash_of_group(file, table, group), **span))
            line += rows
    return blocks


def _hash_of_group(file: str, table: Any, group: int) -> str:
    """The SHA-256 of those columns of a row group that are read, and of their schema."""
    digest = hashlib.sha256(str(table.schema_arrow.remove_metadata()).encode())
    facts = table.metadata.row_group(group)
    with fsspec.open(file, "rb") as stream:
        for column in map(facts.column, range(facts.num_columns)):
            if column.path_in_schema.partition(".")[0] in FIELDS:
                starts = (column.data_page_offset, column.dictionary_page_offset)
                start = min(offset for offset in starts if offset is not None)
                stream.seek(start)
                digest.update(f"{column.path_in_schema} {start} {column.num_values}".encode())
                digest.update(stream.read(column.total_compressed_size))
    return digest.hexdigest()


def _texts_of_rows(block: Block) -> Iterator[TextToScore]:
    with _parquet(block.file) as table:
        _refuse_other_group(block, table)
        columns = [name for name in table.schema_arrow.names if name in FIELDS]
        line = block.line
        for batch in table.iter_batches(1024, row_groups=[block.start], columns=columns):
            for row in batch.to_pylist():
                given = {name: value for name, value in row.items() if value is not None}
                yield to_score(given, f"row {line} of {block.file}")
                line += 1
        _refuse_other_group(block, table)  # it may have changed while it was read


def _refuse_other_group(block: Block, table: Any) -> None:
    groups = table.num_row_groups
    if block.start >= groups or _hash_of_group(block.file, table, block.start) != block.sha256:
        raise _changed(block)


def _parquet(file: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    system, path = fsspec.core.url_to_fs(file)
    try:
        return pyarrow.parquet.ParquetFile(system.open(path))
    except pyarrow.ArrowInvalid as error:
        raise TextError(f"{file} is not a Parquet file ({first_line(error)}).") from error
