"""Opens files that may be compressed with gzip, bz2 or xz: their content is read into bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from runtimes.base.errors import ArtefactError
from runtimes.base.files import open_file, reading
from runtimes.base.machine import memory_bytes
from trainer.data.archives import COMPRESSED, START, SUFFIXES, kind_by_start, opened, reading_archive

# Weights become little smaller and vocabularies a few times; a file that grows more is a bomb.
RATIO = 64
LEAST = 64 << 20
BLOCK = 1 << 20


@dataclass
class Budget:
    """The bytes that compressed files may have together when they are decompressed."""

    what: str  # the file or files, for the message
    size: int  # their bytes as they are
    taken: int = 0  # what was decompressed until now

    def take(self, num_bytes: int) -> None:
        """Counts bytes; raises ArtefactError if there are too many.

        They may be 64 times the bytes of the files, or 64 MiB, and half the memory of the machine at most.
        """
        limit = min(max(LEAST, RATIO * self.size), memory_bytes() // 2)
        self.taken += num_bytes
        if self.taken > limit:
            raise ArtefactError(
                f"{self.what} has {self.size:,} bytes and decompresses to more than {limit:,}, which is too "
                "much for a checkpoint; if you trust it, decompress it first."
            )


def read_content(path: Path, budget: Budget | None = None) -> bytes | None:
    """Returns the content of a compressed file, and None for a file that is not compressed.

    budget: of the files that are kept in memory together; without one, the file has its own. Raises
    ArtefactError if the content is larger, and UserError if the file is damaged or cannot be opened.
    """
    with reading(path), open_file(path) as file:
        if kind_by_start(file.read(START)) not in COMPRESSED:
            return None
        size = file.seek(0, io.SEEK_END)
    budget = budget or Budget(str(path), size)
    content = io.BytesIO()
    with reading_archive(path), opened(path) as stream:
        while block := stream.read(BLOCK):
            budget.take(len(block))
            content.write(block)
    return content.getvalue()


@contextmanager
def open_content(path: Path, budget: Budget | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """Yields the content of a file as a stream that can be sought, and the number of its bytes.

    A file that is compressed with gzip, bz2 or xz is decompressed into memory. Raises what `read_content`
    raises.
    """
    content = read_content(path, budget)
    with reading(path), open_file(path) if content is None else io.BytesIO(content) as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        yield stream, size


def inner_suffix(path: Path) -> str:
    """Returns the suffix of the content: `.npz` for `model.npz` and for `model.npz.xz`."""
    return Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix


def present(folder: Path, name: str) -> Path | None:
    """Returns the file of this name in a folder, or the same name with .gz, .bz2 or .xz; None for neither."""
    return next((path for end in ("", *SUFFIXES) if (path := folder / (name + end)).is_file()), None)
