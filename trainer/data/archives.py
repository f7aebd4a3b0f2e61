"""Finds files in what people have: a folder, a zip, a tar, a single file, and the latter two also compressed.

Compressions are gzip, bz2 and xz. An archive may come from a stranger. So no file is written under a name
from the archive,
links and other special members are skipped, and two sizes are limited: what the headers claim, and what is
really unpacked.
"""

from __future__ import annotations

import bz2
import lzma
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, Protocol

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import NPZ_ERRORS
from trainer.data.formats import COMPRESSED, kind_of

SUFFIXES = (".gz", ".bz2", ".xz")  # of a compressed single file
BLOCK = 1 << 20
MAX_MEMBERS = 100_000  # of an archive or a folder: the largest corpus has 152
READ_ERRORS = (*NPZ_ERRORS, tarfile.TarError, lzma.LZMAError, OSError)
MAX_DIRECTORY = 1 << 24  # bytes of a zip's list of members, which zipfile reads in one piece
MAX_FILES = 1_000  # wanted files of one source
MAX_WINDOW = 1 << 28  # bytes of memory that an xz file may ask for; `xz -9` needs 65 MiB
Wanted = Callable[[str], bool]
Tick = Callable[[int], object]


@dataclass(frozen=True)
class Contents:
    """What a source holds."""

    # The wanted files, by their names inside the source.
    files: dict[str, Path] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # the names of all its files
    is_single: bool = False  # the source is one file that is no archive; it may be compressed


def is_packed(path: Path) -> bool:
    """Whether `path` is an archive or a compressed file."""
    return path.is_file() and kind_of(path) in ("zip", "tar", *COMPRESSED)


def find_files(
    source: Path, wanted: Wanted, *, scratch: Path, limit: int, tick: Tick = lambda num_bytes: None
) -> Contents:
    """The files of `source` whose names are `wanted`, in place or unpacked into the new folder `scratch`.

    A single file is taken whatever its name is. limit: the most bytes that the wanted files may have, or all
    members of a tar together. tick: called with the number of bytes of the source that were read. Raises
    UserError for a source that is missing, damaged, encrypted or larger.
    """
    if source.is_dir():
        return _in_folder(source, wanted, limit)
    if not source.is_file():
        raise UserError(
            f"{source} is neither a file nor a folder; give the archive, the folder or the file of the "
            "corpus."
        )
    kind = kind_of(source)
    if source.stat().st_size > limit:
        raise UserError(
            f"{source} has {source.stat().st_size:,} bytes, and at most {limit:,} were expected; it is "
            "something else."
        )
    if not is_packed(source):
        return Contents({source.name: source}, [source.name], is_single=True)
    scratch.mkdir()
    if kind == "zip":
        return _from_zip(source, wanted, scratch, limit, tick)
    return (_from_tar if kind == "tar" or _holds_tar(source) else _from_single)(
        source, wanted, scratch, limit, tick
    )


def _holds_tar(source: Path) -> bool:
    """Whether a compressed file starts with the header of a tar."""
    with reading_archive(source), opened(source) as stream:
        start = stream.read(tarfile.BLOCKSIZE)
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return not start.strip(b"\0")  # a tar without members is zeros
    return True


def _in_folder(source: Path, wanted: Wanted, limit: int) -> Contents:
    found = Contents()
    for folder, _, names in os.walk(source):
        for name in sorted(names):
            path = Path(folder, name)
            if len(found.names) >= MAX_MEMBERS:
                raise UserError(
                    f"{source} holds more than {MAX_MEMBERS:,} files; give the folder of the corpus alone."
                )
            found.names.append(path.relative_to(source).as_posix())
            if wanted(found.names[-1]) and path.is_file():
                found.files[found.names[-1]] = path
    num_bytes = sum(path.stat().st_size for path in found.files.values())
    if num_bytes > limit:
        raise UserError(
            f"the files in {source} have {num_bytes:,} bytes, and at most {limit:,} were expected; they are "
            "others."
        )
    return found


def _from_zip(source: Path, wanted: Wanted, scratch: Path, limit: int, tick: Tick) -> Contents:
    found = Contents()
    left = limit
    with _Pieces(_Counted(source, tick)) as pieces:
        with reading_archive(source):
            archive = zipfile.ZipFile(pieces)
        if len(archive.infolist()) > MAX_MEMBERS:
            raise UserError(f"{source} holds more than {MAX_MEMBERS:,} members; it is something else.")
        for member in archive.infolist():
            found.names.append(member.filename)
            if member.is_dir() or stat.S_ISLNK(member.external_attr >> 16) or not wanted(member.filename):
                continue
            if member.flag_bits & 1:
                raise UserError(
                    f"{source} is encrypted; give the archive as it was published, or the folder of its "
                    "files."
                )
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UserError(f"{source} is compressed in an unusual way; unpack it and give the folder.")
            left = _less(left, member.file_size, source)
            with reading_archive(source):
                stream = archive.open(member)
            with stream:
                _unpack(source, stream, member.filename, member.file_size, found, scratch)
    return found


def _from_tar(source: Path, wanted: Wanted, scratch: Path, limit: int, tick: Tick) -> Contents:
    found = Contents()
    with opened(source, tick) as file:
        stream = _Forward(file, source, limit)
        with reading_archive(source):
            members = iter(tarfile.TarFile(fileobj=stream))  # type: ignore[arg-type]
        while True:
            with reading_archive(source):
                member = next(members, None)
            if member is None:
                return found
            if len(found.names) >= MAX_MEMBERS:
                raise UserError(f"{source} holds more than {MAX_MEMBERS:,} members; it is something else.")
            found.names.append(member.name)
            if member.isreg() and not member.issparse() and wanted(member.name):
                _less(limit, member.size, source)
                with reading_archive(source):
                    stream.seek(member.offset_data)
                _unpack(source, stream, member.name, member.size, found, scratch)


def _from_single(source: Path, wanted: Wanted, scratch: Path, limit: int, tick: Tick) -> Contents:
    """The content of a compressed file that is no archive, whatever its name is."""
    name = source.stem if source.suffix in SUFFIXES else source.name
    path = scratch / f"{0:06}"
    with opened(source, tick) as file, open(path, "wb") as target:
        stream = _Forward(file, source, limit)
        while True:
            with reading_archive(source):
                block = stream.read(BLOCK)
            if not block:
                return Contents({name: path}, [name], is_single=True)
            target.write(block)


@contextmanager
def opened(source: Path, tick: Tick = lambda num_bytes: None) -> Iterator[Readable]:
    """The content of a file that may be compressed, as a stream to be read once."""
    kind = kind_of(source)
    with BufferedReader(_Counted(source, tick)) as file:
        if kind == "gzip":
            yield GzipFile(fileobj=file)
        elif kind == "bz2":
            yield BufferedReader(_Decompressed(file, bz2.BZ2Decompressor))
        elif kind == "xz":
            yield BufferedReader(
                _Decompressed(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW))
            )
        else:
            yield file


def _unpack(source: Path, stream: Readable, name: str, size: int, found: Contents, scratch: Path) -> None:
    """Copies the `size` bytes of one member to a file that is named by its number."""
    if name in found.files or len(found.files) >= MAX_FILES:
        raise UserError(f"{source} holds {name} too many times; give the archive as it was published.")
    path = found.files[name] = scratch / f"{len(found.files):06}"
    left = size
    with open(path, "wb") as target:
        while left:
            with reading_archive(source):
                block = stream.read(min(BLOCK, left))
                if not block:
                    raise EOFError(f"{name} ends {left:,} bytes early")
            target.write(block)
            left -= len(block)


def _less(left: int, size: int, source: Path) -> int:
    if not 0 <= size <= left:
        raise UserError(
            f"{source} unpacks to more than the {left:,} bytes that were expected; it is something else."
        )
    return left - size


@contextmanager
def reading_archive(source: Path) -> Iterator[None]:
    """Turns whatever a damaged archive makes its reader raise into one sentence."""
    try:
        yield
    except UserError:
        raise
    except READ_ERRORS as error:
        raise UserError(
            f"{source} is damaged, or not what its first bytes promise ({first_line(error)}); "
            "copy or download it again."
        ) from error


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Counted(FileIO):
    """A file that tells `tick` how many bytes were read from it."""

    def __init__(self, path: Path, tick: Tick) -> None:
        super().__init__(path)
        self._tick = tick

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer) or 0
        self._tick(count)
        return count


class _Decompressed(RawIOBase):
    """The content of a bz2 or xz file. Several compressed streams one after the other are one content.

    The reader of the standard library would do as well, but it sets no limit to the memory that an xz file
    asks for.
    """

    def __init__(self, file: Readable, new: Callable[[], Any]) -> None:
        self._file = file
        self._new = new
        self._decompressor = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            given = b""
            if self._decompressor.eof:
                given = (self._decompressor.unused_data or self._file.read(BLOCK)).lstrip(b"\0")  # padding
                if not given:
                    return 0
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                given = self._file.read(BLOCK)
                if not given:
                    raise EOFError("it ends early")
            data = self._decompressor.decompress(given, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


class _Pieces(BufferedReader):
    """A zip file for zipfile, which otherwise reads a list of members of any size that the archive claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        size = MAX_DIRECTORY if size is None or size < 0 else size
        if size > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size:,} bytes")
        return super().read(size)


class _Forward:
    """A stream that is read once from start to end, in small pieces, and up to `limit` bytes.

    tarfile reads headers from it and skips to positions in it. A header with a false size, or one that leads
    backwards for ever, is an error here.
    """

    def __init__(self, stream: Readable, source: Path, limit: int) -> None:
        self._stream = stream
        self._source = source
        self._limit = limit
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= BLOCK:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self._stream.read(size)
        self._at += len(data)
        _less(self._limit, self._at, self._source)
        return data

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise tarfile.ReadError("a member that starts before the end of the last one")
        while self._at < to and self.read(min(BLOCK, to - self._at)):
            pass
        return self._at

    def tell(self) -> int:
        return self._at
