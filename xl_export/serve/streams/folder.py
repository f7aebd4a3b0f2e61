"""The folder of one stored stream: a signed snapshot, and what was appended since, one line an operation.

A snapshot is as large as the memory of a stream, and an appended event may be one token. So most appends add
a line of token ids to a journal. The snapshot and the journal together are the stream: fed again in the same
pieces, the tokens give bit for bit the same state.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import flush as flush_file
from runtimes.base.files import open_file, read_bytes, read_json, write_json
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.snapshot import read_snapshot, write_snapshot

FACTS = "facts.json"
SNAPSHOT = re.compile(r"(\d{6,18})@(\d{1,19})\.stream")


class UnwritableError(UserError):
    """The disk of the server is full, or refuses for another reason."""


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """Turns errors of the disk into one sentence for a client, which names no path of the server."""
    try:
        yield
    except (OSError, UserError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise UnwritableError(
            f"the server could not write the stream ({cause.strerror or cause}), which stays as it was "
            "before this operation; delete streams, or ask its operator for space."
        ) from error


@dataclass
class StreamFolder:
    """The files of a stream as they are now. One thread at a time may use it; any may read `position`.

    version: of the snapshot; each new one has a larger number. begin: the position in the snapshot. appended:
    the lines of the journal. snapshot_bytes, journal_bytes: of the two files. position: of the stream:
    the position in the snapshot plus the appended tokens; it is assigned once, at the end of each change.
    flush: whether what was written is on the disk, and not only with the system, when a method returns.
    """

    path: Path
    version: int
    begin: int
    appended: list[np.ndarray]
    journal_bytes: int = 0
    snapshot_bytes: int = 0
    flush: bool = False
    position: int = field(init=False)

    def __post_init__(self) -> None:
        self.position = self.begin + self.num_appended

    @staticmethod
    def create(
        path: Path, state: StreamState, facts: dict[str, Any], *, key: bytes, flush: bool = False
    ) -> StreamFolder:
        """A new folder, which appears whole."""
        with _appearing(path, facts, flush=flush) as hidden:
            snapshot = hidden / _name(0, state.position)
            write_snapshot(state, snapshot, key=key)
            size = snapshot.stat().st_size
        return StreamFolder(path, 0, state.position, appended=[], snapshot_bytes=size, flush=flush)

    @staticmethod
    def open(path: Path, *, flush: bool = False) -> tuple[StreamFolder, dict[str, Any]]:
        """The folder that a server left, however it ended, and the facts in it. What a kill left unfinished
        is removed. Raises ArtefactError if it is no whole stream.
        """
        facts = read_json(path / FACTS)
        found = sorted(
            (int(match[1]), int(match[2]))
            for entry in os.scandir(path)
            if (match := SNAPSHOT.fullmatch(entry.name))
        )
        if not found or not isinstance(facts, dict):
            raise ArtefactError(f"{path} holds no stream; remove the folder, or copy it whole.")
        folder = StreamFolder(path, *found[-1], appended=[], flush=flush)
        folder.snapshot_bytes = folder._snapshot.stat().st_size
        folder._read_journal()
        folder._tidy()
        return folder, facts

    @property
    def num_appended(self) -> int:
        """How many tokens have to be fed again after the snapshot was read."""
        return sum(map(len, self.appended))

    @property
    def written_at(self) -> float:
        """When the stream was written last, in seconds since 1970."""
        files = (self._snapshot, self._journal)
        return max(file.stat().st_mtime for file in files if file.exists())

    def read(self, session: Session, *, key: bytes) -> StreamState:
        """The stream in the snapshot; `appended` has to be fed to it, each as one task."""
        return read_snapshot(self._snapshot, session, key=key, name=f"the stored stream {self.path.name}")

    def open_snapshot(self) -> BinaryIO:
        """The file of the snapshot, open for reading; it stays readable when it is replaced."""
        return open_file(self._snapshot)

    def append(self, tokens: np.ndarray) -> None:
        """Adds a line to the journal: it is there as a whole, or the operation is refused."""
        line = json.dumps(tokens.tolist(), separators=(",", ":")).encode() + b"\n"
        with _written():
            file = os.open(self._journal, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # What a refused append has left is written over; the rest of it has no end of a line.
                if os.pwrite(file, line, self.journal_bytes) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self.flush:
                    self._flush(file)
            finally:
                os.close(file)
        self.journal_bytes += len(line)
        self.appended.append(tokens)
        self.position += len(tokens)

    def _flush(self, file: int) -> None:
        """Brings the journal to the disk; if that fails, the line that was written last is taken back."""
        try:
            os.fsync(file)
            if not self.journal_bytes:  # the name of a new file is in its folder
                flush_folder(self.path)
        except OSError:
            os.ftruncate(file, self.journal_bytes)
            raise

    def replace(self, state: StreamState, *, key: bytes) -> None:
        """Writes a new snapshot in place of the old one and the journal. A kill leaves either of them."""
        version = self.version + 1
        path = self.path / _name(version, state.position)
        with _written():
            try:
                write_snapshot(state, path, key=key)
                size = path.stat().st_size
                if self.flush:  # before the files that it replaces are removed
                    flush_folder(self.path)
            except BaseException:  # what was refused must not be there after a restart
                path.unlink(missing_ok=True)
                raise
        self.version = version
        self.begin = state.position
        self.appended = []
        self.journal_bytes = 0
        self.position = state.position
        self.snapshot_bytes = size
        self._tidy()

    def fork(self, path: Path, facts: dict[str, Any]) -> StreamFolder:
        """A second folder of the same stream. The two share the bytes of the snapshot on the disk."""
        with _appearing(path, facts, flush=self.flush) as hidden:
            try:
                os.link(self._snapshot, hidden / self._snapshot.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(self._snapshot, hidden / self._snapshot.name)
                if self.flush:
                    flush_file(hidden / self._snapshot.name)
            if self.journal_bytes:
                content = read_bytes(self._journal)[: self.journal_bytes]
                (hidden / self._journal.name).write_bytes(content)
                if self.flush:
                    flush_file(hidden / self._journal.name)
        return replace(self, path=path, appended=list(self.appended))

    def delete(self) -> None:
        """Removes the stream. It is gone as a whole with the first step of this."""
        with _written():
            gone = self.path.with_name(f".{self.path.name}.deleted")
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)

    @property
    def _snapshot(self) -> Path:
        return self.path / _name(self.version, self.begin)

    @property
    def _journal(self) -> Path:
        return self.path / f"{self.version:06d}.journal"

    def _read_journal(self) -> None:
        """The whole lines of the journal; a last one that is not whole was never answered."""
        if not self._journal.exists():
            return
        lines: Sequence[bytes] = read_bytes(self._journal).split(b"\n")[:-1]
        try:
            self.appended = [np.array(json.loads(line), np.int64) for line in lines]
        except ValueError as error:
            raise ArtefactError(f"{self._journal} is damaged; remove the stream's folder.") from error
        self.journal_bytes = sum(len(line) + 1 for line in lines)
        self.position = self.begin + self.num_appended

    def _tidy(self) -> None:
        """Removes what belongs to an older snapshot, and what a kill left unfinished."""
        keep = {FACTS, self._snapshot.name, self._journal.name}
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.name not in keep:
                    os.unlink(entry.path)


def flush_folder(path: Path) -> None:
    """Brings the names in a folder to the disk; raises OSError if the disk refuses."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _name(version: int, position: int) -> str:
    return f"{version:06d}@{position}.stream"


@contextlib.contextmanager
def _appearing(path: Path, facts: dict[str, Any], *, flush: bool) -> Iterator[Path]:
    """A hidden folder that becomes `path` when the block ends without an error.

    flush: whether it is on the disk then, under its name; what the block writes is flushed by the block.
    """
    hidden = path.with_name(f".{path.name}.new")
    with _written():
        try:
            hidden.mkdir(mode=0o700)
            yield hidden
            write_json(hidden / FACTS, facts)
            if flush:
                flush_folder(hidden)
            os.rename(hidden, path)
            if flush:
                try:
                    flush_folder(path.parent)
                except OSError:  # the operation is refused, so the stream must not be there after a restart
                    os.rename(path, hidden)
                    raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what a kill left: streams that were never answered, or were deleted, and uploads."""
    for entry in list(os.scandir(parent)):
        if entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.endswith(".upload"):
            os.unlink(entry.path)
