"""Finds files in what people have: a folder, a zip, a tar, a single file, and the latter two also compressed.

Compressions are gzip, bz2 and xz. An archive may come from a stranger. So no file is written under a name
from the archive, links and other special members are skipped, and two sizes are limited: what the headers
claim, and what is really unpacked.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from gzip import GzipFile
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, Literal, Protocol

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import open_file, reading, writing
from runtimes.base.npz import NPZ_ERRORS

SUFFIXES = (".gz", ".bz2", ".xz")  # of a compressed single file
BLOCK_BYTES = 1 << 20
MAX_MEMBERS = 100_000  # of an archive: the largest corpus has 152
READ_ERRORS = (*NPZ_ERRORS, tarfile.TarError, lzma.LZMAError, OSError)
MAX_DIRECTORY = 1 << 24  # bytes of a zip's list of members, which zipfile reads in one piece
MAX_WINDOW = 1 << 28  # bytes of memory that an xz file may ask for; `xz -9` needs 65 MiB
Kind = Literal["zip", "tar", "gzip", "bz2", "xz", "npy"]
COMPRESSED = ("gzip", "bz2", "xz")
MAGIC_BYTES = 262  # bytes that show the kind of a file

Wanted = Callable[[str], bool]
Tick = Callable[[int], object]  # called with the number of bytes that were done since the last call


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


# Name, size and, of a regular file, what opens it.
Member = tuple[str, int, Callable[[], Readable] | None]


@dataclass(frozen=True)
class Contents:
    """What a source holds."""

    files: dict[str, Path] = field(default_factory=dict)
    """The wanted files, by their names inside the source."""
    is_single: bool = False  # the source is one file that is no archive; it may be compressed


def kind_of(path: Path) -> Kind | None:
    """The kind of a file, or None for another, such as a text. Raises UserError for an unreadable file."""
    with reading(path), open_file(path) as stream:
        start = stream.read(MAGIC_BYTES)
    if start[:4] in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    # A text could begin with the name; the first block of the file, or its end, has a mark of its own.
    if start[:3] == b"BZh" and start[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    if start[:6] == b"\xfd7zXZ\0":
        return "xz"
    if start[:6] == b"\x93NUMPY":
        return "npy"
    return "tar" if start[257:262] == b"ustar" else None


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
    if source.stat().st_size > limit:
        raise UserError(
            f"{source} has {source.stat().st_size:,} bytes, and at most {limit:,} were expected; it is "
            "something else."
        )
    if not is_packed(source):
        return Contents({source.name: source}, is_single=True)
    scratch.mkdir()
    kind = kind_of(source)
    if kind not in ("zip", "tar") and not _holds_tar(source):
        # A compressed file that is no archive, whatever its name is.
        name = source.stem if source.suffix in SUFFIXES else source.name
        with opened(source, tick) as file, reading_archive(source):
            path = _unpack(_Forward(file, source, limit), scratch / f"{0:06}", None)
        return Contents({name: path}, is_single=True)
    found = Contents()
    left = limit
    members = _members_of_zip(source, tick) if kind == "zip" else _members_of_tar(source, limit, tick)
    with reading_archive(source), contextlib.closing(members):
        for count, (name, size, stream) in enumerate(members):
            if count >= MAX_MEMBERS:
                raise UserError(f"{source} holds more than {MAX_MEMBERS:,} members; it is something else.")
            if stream is None or not wanted(name):
                continue
            left = _less(left, size, source)
            if name in found.files:
                raise UserError(f"{source} holds {name} twice; give the archive as it was published.")
            found.files[name] = _unpack(stream(), scratch / f"{count:06}", size)
    return found


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
    paths = (Path(folder, name) for folder, _, names in os.walk(source) for name in sorted(names))
    named = {path.relative_to(source).as_posix(): path for path in paths}
    files = {name: path for name, path in named.items() if wanted(name) and path.is_file()}
    num_bytes = sum(path.stat().st_size for path in files.values())
    if num_bytes > limit:
        raise UserError(
            f"the files in {source} have {num_bytes:,} bytes, and at most {limit:,} were expected; they are "
            "others."
        )
    return Contents(files)


def _members_of_zip(source: Path, tick: Tick) -> Generator[Member, None, None]:
    with _Pieces(_Counted(source, tick)) as pieces:
        archive = zipfile.ZipFile(pieces)
        for member in archive.infolist():
            if member.flag_bits & 1:
                raise UserError(
                    f"{source} is encrypted; give the archive as it was published, or the folder of its "
                    "files."
                )
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UserError(f"{source} is compressed in an unusual way; unpack it and give the folder.")
            is_file = not (member.is_dir() or stat.S_ISLNK(member.external_attr >> 16))
            yield member.filename, member.file_size, partial(archive.open, member) if is_file else None


def _members_of_tar(source: Path, limit: int, tick: Tick) -> Generator[Member, None, None]:
    with opened(source, tick) as file:
        stream = _Forward(file, source, limit)
        for member in tarfile.TarFile(fileobj=stream):  # type: ignore[arg-type]
            is_file = member.isreg() and not member.issparse()
            yield member.name, member.size, partial(stream.at, member.offset_data) if is_file else None


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


def _unpack(stream: Readable, path: Path, size: int | None) -> Path:
    """Copies the `size` bytes of one member, or all of a stream, to a file; returns its path."""
    left = size
    with open(path, "wb") as target:
        while left != 0:
            block = stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
            if not block and left is None:
                break
            if not block:
                raise EOFError(f"a member ends {left:,} bytes early")
            with writing(path):  # otherwise a full disk would count as damage of the archive
                target.write(block)
            left = None if left is None else left - len(block)
    return path


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
                given = (self._decompressor.unused_data or self._file.read(BLOCK_BYTES)).lstrip(
                    b"\0"
                )  # padding
                if not given:
                    return 0
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                given = self._file.read(BLOCK_BYTES)
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
        if not 0 <= size <= BLOCK_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self._stream.read(size)
        self._at += len(data)
        _less(self._limit, self._at, self._source)
        return data

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise tarfile.ReadError("a member that starts before the end of the last one")
        while self._at < to and self.read(min(BLOCK_BYTES, to - self._at)):
            pass
        return self._at

    def tell(self) -> int:
        return self._at

    def at(self, position: int) -> _Forward:
        """The stream from this position on."""
        self.seek(position)
        return self
