"""Files out of what people have: a folder, a zip, a tar, a tar.gz, or the bare file.

An archive is a stranger's: nothing of it is written under its own names, links and other special members are passed
over, and both what its headers promise and what really comes out of it are bounded.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Protocol

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import NPZ_ERRORS

BLOCK = 1 << 20
MAX_MEMBERS = 100_000  # of an archive or a folder: the largest corpus has 152
READ_ERRORS = (*NPZ_ERRORS, tarfile.TarError, OSError)
MAX_DIRECTORY = 1 << 24  # bytes of a zip's list of members, which zipfile reads in one piece
MAX_FILES = 1_000  # that are wanted
Wanted = Callable[[str], bool]
Tick = Callable[[int], object]


@dataclass(frozen=True)
class Found:
    """`files`: those wanted, by their names inside the source. `names`: of all that it holds."""

    files: dict[str, Path] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def is_archive(path: Path) -> bool:
    """Whether `path` is a file that starts as a zip, gzip or tar does."""
    return path.is_file() and _kind(path) != "file"


def find_files(
    source: Path, wanted: Wanted, *, scratch: Path, limit: int, tick: Tick = lambda num_bytes: None
) -> Found:
    """The files of `source` whose names are `wanted`: in place, or unpacked into the new folder `scratch`.

    limit: the most bytes they, or for a tar all members together, may have. tick: called as bytes are unpacked.
    Raises UserError for a source that is missing, damaged, encrypted or larger.
    """
    if source.is_dir():
        return _in_folder(source, wanted, limit)
    if not source.is_file():
        raise UserError(
            f"{source} is neither a file nor a folder; give the archive, the folder or the file of the corpus."
        )
    kind = _kind(source)
    if source.stat().st_size > limit:
        raise UserError(
            f"{source} has {source.stat().st_size:,} bytes, and at most {limit:,} were expected; it is something else."
        )
    if kind == "file":
        return Found({source.name: source}, [source.name])
    scratch.mkdir()
    return (_from_zip if kind == "zip" else _from_tar)(source, wanted, scratch, limit, tick)


def _kind(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            start = stream.read(262)
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror or error}.") from error
    if start[:4] in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    return "tar" if start[:2] == b"\x1f\x8b" or start[257:262] == b"ustar" else "file"


def _in_folder(source: Path, wanted: Wanted, limit: int) -> Found:
    found = Found()
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
            f"the files in {source} have {num_bytes:,} bytes, and at most {limit:,} were expected; they are others."
        )
    return found


def _from_zip(source: Path, wanted: Wanted, scratch: Path, limit: int, tick: Tick) -> Found:
    found, left = Found(), limit
    with _Pieces(FileIO(source)) as pieces:
        with _reading(source):
            archive = zipfile.ZipFile(pieces)
        if len(archive.infolist()) > MAX_MEMBERS:
            raise UserError(f"{source} holds more than {MAX_MEMBERS:,} members; it is something else.")
        for member in archive.infolist():
            found.names.append(member.filename)
            if member.is_dir() or stat.S_ISLNK(member.external_attr >> 16) or not wanted(member.filename):
                continue
            if member.flag_bits & 1:
                raise UserError(
                    f"{source} is encrypted; give the archive as it was published, or the folder of its files."
                )
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UserError(f"{source} is compressed in an unusual way; unpack it and give the folder.")
            left = _less(left, member.file_size, source)
            with _reading(source):
                stream = archive.open(member)
            with stream:
                _unpack(source, stream, member.filename, member.file_size, found, scratch, tick)
    return found


def _from_tar(source: Path, wanted: Wanted, scratch: Path, limit: int, tick: Tick) -> Found:
    found = Found()
    with open(source, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = _Forward(GzipFile(fileobj=file) if packed else file, source, limit)
        with _reading(source):
            members = iter(tarfile.TarFile(fileobj=stream))  # type: ignore[arg-type]
        while True:
            with _reading(source):
                member = next(members, None)
            if member is None:
                return found
            if len(found.names) >= MAX_MEMBERS:
                raise UserError(f"{source} holds more than {MAX_MEMBERS:,} members; it is something else.")
            found.names.append(member.name)
            if member.isreg() and not member.issparse() and wanted(member.name):
                _less(limit, member.size, source)
                with _reading(source):
                    stream.seek(member.offset_data)
                _unpack(source, stream, member.name, member.size, found, scratch, tick)


def _unpack(
    source: Path, stream: _Readable, name: str, size: int, found: Found, scratch: Path, tick: Tick
) -> None:
    """Copies the `size` bytes of one member to a file with a name of ours."""
    if name in found.files or len(found.files) >= MAX_FILES:
        raise UserError(f"{source} holds {name} too many times; give the archive as it was published.")
    found.files[name] = path = scratch / f"{len(found.files):06}"
    left = size
    with open(path, "wb") as target:
        while left:
            with _reading(source):
                block = stream.read(min(BLOCK, left))
                if not block:
                    raise EOFError(f"{name} ends {left:,} bytes early")
            target.write(block)
            left -= len(block)
            tick(len(block))


def _less(left: int, size: int, source: Path) -> int:
    if not 0 <= size <= left:
        raise UserError(
            f"{source} unpacks to more than the {left:,} bytes that were expected; it is something else."
        )
    return left - size


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turns whatever a damaged archive makes its reader raise into one sentence."""
    try:
        yield
    except UserError:
        raise
    except READ_ERRORS as error:
        raise UserError(
            f"{source} is damaged or no such archive ({first_line(error)}); copy or download it again."
        ) from error


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Pieces(BufferedReader):
    """A zip file for zipfile, which would read and list a directory of any size that the archive claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        size = MAX_DIRECTORY if size is None or size < 0 else size
        if size > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size:,} bytes")
        return super().read(size)


class _Forward:
    """A stream that is read once from start to end, in small pieces, and no further than `limit`.

    tarfile asks it for whole headers and for places to go to; headers that lie about their size, or lead backwards for
    ever, end here.
    """

    def __init__(self, stream: _Readable, source: Path, limit: int) -> None:
        self._stream, self._source, self._limit, self._at = stream, source, limit, 0

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
