"""One SQLite database of streams: a row each, its snapshot, and what was fed since the snapshot.

A snapshot is as large as the memory of a stream, and what is appended may be one token. So most appends add a
row to a journal. The snapshot and the journal together are the stream: what was appended, fed again in the
same pieces, gives the same state bit for bit. Forks share a snapshot. A large one is a file in the folder
`snapshots`, written before the transaction that names it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np

from runtimes.base.errors import ArtefactError, UserError, first_line
from runtimes.base.files import open_file
from runtimes.base.records import json_text
from runtimes.base.tensors_file import tensors_in_bytes, write_tensors
from runtimes.contract.memory_identity import MemoryIdentity, Owner
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.snapshot import read_snapshot, write_snapshot

LOG = logging.getLogger(__name__)
FILE = "streams.sqlite"
FOLDER = "snapshots"
RESERVE = "reserve"
VERSION = 1  # schema version
INLINE_BYTES = 1 << 20  # largest snapshot in the database; a larger one is a file, written only once
RESERVE_BYTES = 4 << 20  # about the size at which SQLite moves its log to the database
BUSY_SECONDS = 10  # that another program, such as a backup, may hold the database up
SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshot (
    id INTEGER PRIMARY KEY,
    bytes INTEGER NOT NULL,
    content BLOB, -- a file of saved streams with one row
    file TEXT     -- its name, if it is a file in the folder of snapshots
);
CREATE TABLE IF NOT EXISTS stream (
    key INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again
    owner TEXT NOT NULL,    -- the name of an API key; empty without keys
    id TEXT NOT NULL,
    created REAL NOT NULL,  -- in seconds since 1970
    used REAL NOT NULL,
    artefact TEXT NOT NULL, -- the identity of the model that computed it,
    layout TEXT NOT NULL,   -- of the layout of its memory
    weights TEXT NOT NULL,  -- and of the model's weights
    adopted TEXT NOT NULL DEFAULT '', -- the weights before, if it continued with others
    position INTEGER NOT NULL,
    version INTEGER NOT NULL, -- how often it was written
    note TEXT NOT NULL DEFAULT '', -- of a replica: the last request and its answer
    snapshot INTEGER NOT NULL REFERENCES snapshot,
    UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS stream_snapshot ON stream (snapshot);
CREATE TABLE IF NOT EXISTS journal (
    n INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL REFERENCES stream ON DELETE CASCADE,
    tokens INTEGER NOT NULL,
    fed BLOB NOT NULL -- token ids in JSON, or the inputs of a step as safetensors
);
CREATE INDEX IF NOT EXISTS journal_stream ON journal (stream);
"""
STREAMS = """
SELECT id, owner, created, used, artefact, layout, weights, adopted, position, key, version, note,
    (SELECT bytes FROM snapshot WHERE snapshot.id = stream.snapshot),
    (SELECT COALESCE(SUM(tokens), 0) FROM journal WHERE stream = key),
    (SELECT COALESCE(SUM(LENGTH(fed)), 0) FROM journal WHERE stream = key)
FROM stream
"""


@dataclass(frozen=True)
class StepInputs:
    """What one step of a model with named inputs was fed; its length is the number of tokens."""

    arrays: dict[str, np.ndarray]
    tokens: int

    def __len__(self) -> int:
        return self.tokens


# What one operation has fed to a stream: token ids int64 [N], or the inputs of a step.
Appended: TypeAlias = np.ndarray | StepInputs


class UnwritableError(UserError):
    """The disk of the server is full, or refuses for another reason."""


class DamagedStreamError(UserError):
    """What is stored of the stream is damaged. The log has the reason, which may name paths of the server."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the stream {name} is damaged on the server's disk and cannot go on; restore a snapshot of it, "
            "or ask the operator of the server, whose log has the reason."
        )


class UnreadableError(UserError):
    """The disk did not return the stream, which may be whole; the log has the reason."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the server could not read the stream {name} from its disk; try again, or ask the operator of "
            "the server, whose log has the reason."
        )


@dataclass(eq=False)
class Stream:
    """A stream as its row is, and as the server uses it."""

    id: str
    owner: str
    """Name of the API key."""
    created: float
    used: float
    computed_by: Owner
    """The artefact or run that computed its memory."""
    adopted: str = ""
    """The weights before, if the stream was adopted by a model with others; hashes with spaces between them.
    """
    position: int = 0
    """Number of tokens fed."""
    key: int = 0
    """Key of the row."""
    version: int = 0
    """Number of times that the row was written."""
    note: str = ""
    """Text of a replica."""
    snapshot_bytes: int = 0
    ahead: int = 0
    """Number of tokens in the journal."""
    journal_bytes: int = 0
    state: StreamState | None = field(default=None, repr=False)
    """The stream now, if it is in RAM."""
    damaged: bool = False
    """Whether its rows or its file are known to be damaged."""
    busy: bool = False
    """Whether an operation is running."""
    cancel: Callable[[], None] | None = None
    """Ends the operation that is running early."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while the row or the state changes; `busy` lasts a whole operation."""


class Database:
    """The database in one file. All methods may be called from any thread, and use the disk.

    A method that changes something either returns and has done so, or raises UnwritableError and has changed
    nothing, in the database and in the `Stream`.
    """

    def __init__(self, folder: Path, name: str = FILE, *, flush: bool = False, shared: bool = False) -> None:
        """flush: whether each change is on the disk, and not only with the system, when a method returns.
        shared: whether processes on several machines use the file; it then has no files next to it.

        Raises UserError for a file that is no such database.
        """
        path = folder / name
        self.folder = folder
        self._path = path
        self._folder = folder / FOLDER
        self._reserve = folder / RESERVE
        self._inline = (1 << 62) if shared else INLINE_BYTES
        self._lock = threading.Lock()
        self.snapshots_read = 0
        """Number of snapshots that were read, and of those that were written."""
        self.snapshots_written = 0
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let everyone read it
            self._sql = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            # The write-ahead log needs memory that all its processes share; network file systems have none.
            self._sql.execute(f"PRAGMA journal_mode = {'TRUNCATE' if shared else 'WAL'}")
            self._sql.execute(f"PRAGMA synchronous = {'FULL' if flush or shared else 'NORMAL'}")
            self._sql.execute("PRAGMA foreign_keys = ON")
            (version,) = self._sql.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise UserError(f"{path} has format {version}, and this release reads {VERSION}; update it.")
            if version == 0:
                self._sql.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
            if not shared:
                self._keep_reserve()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{path} cannot be used ({first_line(error)}); restore a backup, or give another folder."
            ) from error

    def close(self) -> None:
        """Gives the file back; waits for the transaction that runs."""
        with self._lock:
            self._sql.close()

    def streams(self) -> list[Stream]:
        """All streams."""
        with self._lock:
            return [_stream(row) for row in self._sql.execute(STREAMS)]

    def find(self, owner: str, name: str) -> Stream | None:
        """One stream as its row is now. Raises UnreadableError."""
        try:
            with self._lock:
                row = self._sql.execute(f"{STREAMS} WHERE owner = ? AND id = ?", (owner, name)).fetchone()
        except sqlite3.Error as error:
            LOG.error("the row of the stream %s could not be read: %s", name, error)
            raise UnreadableError(name) from error
        return None if row is None else _stream(row)

    def sweep(self) -> set[int]:
        """Removes the files that no row names, and returns the keys of streams whose file is missing."""
        with self._lock:
            rows = self._sql.execute(
                "SELECT file, key FROM snapshot JOIN stream ON snapshot = snapshot.id WHERE file IS NOT NULL"
            ).fetchall()
        there = set(os.listdir(self._folder)) if self._folder.is_dir() else set()
        for file in there - {file for file, _ in rows}:
            (self._folder / file).unlink()
        return {key for file, key in rows if file not in there}

    def upload(self) -> BinaryIO:
        """A file without a name, for a snapshot that arrives."""
        with _refusing():
            return cast(BinaryIO, tempfile.TemporaryFile(dir=self.folder))

    def insert(self, stream: Stream, state: StreamState) -> None:
        """Adds a stream in this state. Raises sqlite3.IntegrityError if there is one of that name."""
        with self._snapshot(state) as (size, content, file), self._transaction() as sql:
            snapshot = _inserted(sql, size, content, file)
            key = sql.execute(
                "INSERT INTO stream (owner, id, created, used, artefact, layout, weights, adopted, position, "
                "version, note, snapshot) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
                (
                    stream.owner,
                    stream.id,
                    stream.created,
                    stream.used,
                    *_columns(stream.computed_by).values(),
                    stream.adopted,
                    state.position,
                    stream.note,
                    snapshot,
                ),
            ).lastrowid
        self.snapshots_written += 1
        _set(stream, key=key, version=1, position=state.position, snapshot_bytes=size)

    def append(self, stream: Stream, fed: Appended) -> None:
        """Adds what was fed to the journal."""
        written = _written(fed)
        position = stream.position + len(fed)
        with self._transaction() as sql:
            sql.execute(
                "INSERT INTO journal (stream, tokens, fed) VALUES (?, ?, ?)", (stream.key, len(fed), written)
            )
            _update(sql, stream, position=position, used=stream.used)
        ahead, num_bytes = stream.ahead + len(fed), stream.journal_bytes + len(written)
        _set(stream, version=stream.version + 1, position=position, ahead=ahead, journal_bytes=num_bytes)

    def replace(self, stream: Stream, state: StreamState, *, note: str = "") -> bool:
        """Writes a new snapshot in place of the old one and the journal; False, and nothing is changed, if
        another process has written the stream since it was read here.
        """
        state.memory.note_adopted([stream.adopted])
        with self._snapshot(state) as (size, content, file), self._transaction() as sql:
            old = sql.execute(
                "SELECT snapshot FROM stream WHERE key = ? AND version = ?", (stream.key, stream.version)
            ).fetchone()
            if old is None:
                return False
            snapshot = _inserted(sql, size, content, file)
            sql.execute("DELETE FROM journal WHERE stream = ?", (stream.key,))
            _update(
                sql,
                stream,
                position=state.position,
                used=stream.used,
                snapshot=snapshot,
                note=note,
                adopted=stream.adopted,
                **_columns(state.memory.owner),
            )
            unused = self._forgotten(sql, *old)
        self._remove(unused)
        self.snapshots_written += 1
        _set(
            stream,
            version=stream.version + 1,
            position=state.position,
            computed_by=state.memory.owner,
            note=note,
            snapshot_bytes=size,
            ahead=0,
            journal_bytes=0,
        )
        return True

    def fork(self, stream: Stream, fork: Stream) -> None:
        """Adds a second stream in the state of the first."""
        with self._transaction() as sql:
            key = sql.execute(
                "INSERT INTO stream (owner, id, created, used, artefact, layout, weights, adopted, position, "
                "version, note, snapshot) SELECT owner, ?, ?, ?, artefact, layout, weights, adopted, "
                "position, 1, note, snapshot FROM stream WHERE key = ?",
                (fork.id, fork.created, fork.used, stream.key),
            ).lastrowid
            sql.execute(
                "INSERT INTO journal (stream, tokens, fed) SELECT ?, tokens, fed FROM journal "
                "WHERE stream = ? ORDER BY n",
                (key, stream.key),
            )
        _set(fork, key=key, version=1)

    def delete(self, stream: Stream) -> None:
        """Removes a stream for ever. That writes too, so on a full disk it uses the space of the reserve."""
        try:
            self._delete(stream)
        except UnwritableError:
            if not self._reserve.exists():
                raise
            with self._lock, contextlib.suppress(OSError, sqlite3.Error):
                self._reserve.unlink()
                self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._delete(stream)

    def _delete(self, stream: Stream) -> None:
        with self._transaction() as sql:
            old = sql.execute("SELECT snapshot FROM stream WHERE key = ?", (stream.key,)).fetchone()
            sql.execute("DELETE FROM stream WHERE key = ?", (stream.key,))
            unused = None if old is None else self._forgotten(sql, *old)
        self._remove(unused)

    def load(
        self, stream: Stream, session: Session, *, adopt: bool = False
    ) -> tuple[StreamState, list[Appended]]:
        """The stream in its snapshot, and what has to be fed to it, each as one task. Raises
        DamagedStreamError and UnreadableError, and StreamError if the session cannot continue the stream.
        """
        with _reading(stream):
            with self.open_snapshot(stream) as file:
                state = read_snapshot(file, session, name=f"the stored stream {stream.id}", adopt=adopt)
            with self._lock:
                rows = self._sql.execute(
                    "SELECT fed, tokens FROM journal WHERE stream = ? ORDER BY n", (stream.key,)
                ).fetchall()
            self.snapshots_read += 1
            if (adopted := str(state.memory.adopted[0])) != stream.adopted:
                LOG.warning("the stream %s continues with other weights than %s", stream.id, adopted)
                stream.adopted = adopted  # `replace` writes it with what the model computes
            return state, [_fed(*row) for row in rows]

    def open_snapshot(self, stream: Stream) -> BinaryIO:
        """The snapshot, open for reading; it stays readable when it is replaced. Raises as `load`."""
        with _reading(stream):
            with self._lock:
                row = self._sql.execute(
                    "SELECT content, file FROM snapshot JOIN stream ON snapshot = snapshot.id WHERE key = ?",
                    (stream.key,),
                ).fetchone()
            if row is None:  # another replica has removed it
                raise FileNotFoundError(stream.id)
            content, file = row
            return io.BytesIO(content) if file is None else open_file(self._folder / file)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _refusing():
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield self._sql
                self._sql.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._sql.in_transaction:
                        self._sql.execute("ROLLBACK")
                    if isinstance(error, sqlite3.OperationalError):
                        # If the disk failed while COMMIT flushed the log, the log has the whole transaction,
                        # and a restart would do what is refused here. Any other one takes its place there.
                        self._sql.execute(f"PRAGMA user_version = {VERSION}")
                raise

    @contextlib.contextmanager
    def _snapshot(self, state: StreamState) -> Iterator[tuple[int, bytes | None, str | None]]:
        """A snapshot for a new row: its size, and its content or the name of its file."""
        if state.num_bytes <= self._inline:
            buffer = io.BytesIO()
            write_snapshot(state, buffer)
            yield buffer.tell(), buffer.getvalue(), None
            return
        path = self._folder / f"{secrets.token_hex(12)}.stream"
        try:
            with _refusing():
                self._folder.mkdir(mode=0o700, exist_ok=True)
                with open(path, "xb") as stream:
                    write_snapshot(state, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                flush_folder(self._folder)
                size = path.stat().st_size
            yield size, None, path.name
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _forgotten(self, sql: sqlite3.Connection, snapshot: int) -> Path | None:
        """Deletes a snapshot if no stream names it any more; returns its file, if it has one."""
        row = sql.execute(
            "SELECT file FROM snapshot WHERE id = ? AND NOT EXISTS (SELECT 1 FROM stream WHERE snapshot = ?)",
            (snapshot, snapshot),
        ).fetchone()
        if row is None:
            return None
        sql.execute("DELETE FROM snapshot WHERE id = ?", (snapshot,))
        return None if row[0] is None else self._folder / row[0]

    def _keep_reserve(self) -> None:
        """Allocates the reserve, if the disk has room for it."""
        with contextlib.suppress(OSError), open(self._reserve, "ab") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError:
                self._reserve.unlink()

    def _remove(self, path: Path | None) -> None:
        """Removes a file that nothing needs; if that fails, the next start does.

        The log is flushed before: otherwise a power failure could bring back a row that names the file.
        """
        if path is not None:
            with contextlib.suppress(OSError):
                with open(f"{self._path}-wal", "rb") as log:
                    os.fsync(log.fileno())
                path.unlink()


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns errors of the disk into one sentence for a client, which names no path of the server."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except (OSError, sqlite3.DatabaseError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        raise UnwritableError(
            f"the server could not write the stream ({cause or first_line(error)}), which stays as it was "
            "before this operation; delete streams, or ask its operator for space."
        ) from error


@contextlib.contextmanager
def _reading(stream: Stream) -> Iterator[None]:
    """Turns errors of reading a stream into a sentence for its client; the log has the reason."""
    try:
        yield
    except (OSError, sqlite3.Error, ArtefactError) as error:
        LOG.error("the stored stream %s could not be read: %s", stream.id, error)
        if isinstance(error, (FileNotFoundError, ArtefactError)):
            stream.damaged = True
            raise DamagedStreamError(stream.id) from error
        raise UnreadableError(stream.id) from error


def _inserted(sql: sqlite3.Connection, size: int, content: bytes | None, file: str | None) -> int | None:
    return sql.execute(
        "INSERT INTO snapshot (bytes, content, file) VALUES (?, ?, ?)", (size, content, file)
    ).lastrowid


def _update(sql: sqlite3.Connection, stream: Stream, **columns: object) -> None:
    names = ", ".join(f"{name} = ?" for name in columns)
    sql.execute(
        f"UPDATE stream SET version = version + 1, {names} WHERE key = ?", (*columns.values(), stream.key)
    )


def _stream(row: tuple[Any, ...]) -> Stream:
    name, owner, created, used, artefact, layout, weights, *rest = row
    computed_by = Owner(artefact, MemoryIdentity(layout=layout, weights=weights))
    return Stream(name, owner, created, used, computed_by, *rest)


def _columns(owner: Owner) -> dict[str, str]:
    return {"artefact": owner.artefact, "layout": owner.memory.layout, "weights": owner.memory.weights}


def _set(stream: Stream, **values: object) -> None:
    for name, value in values.items():
        setattr(stream, name, value)


def _written(fed: Appended) -> str | bytes:
    """What was fed, for the journal."""
    if not isinstance(fed, StepInputs):
        return json_text(fed.tolist(), separators=(",", ":"))
    file = io.BytesIO()
    write_tensors(file, fed.arrays, {})
    return file.getvalue()


def _fed(written: str | bytes, tokens: int) -> Appended:
    """What a row of the journal says; raises ArtefactError for a damaged one."""
    if isinstance(written, bytes):
        return StepInputs(tensors_in_bytes(written, Path("the journal"))[0], tokens)
    try:
        return np.array(json.loads(written), np.int64)
    except ValueError as error:
        raise ArtefactError("the journal is damaged.") from error


def flush_folder(path: Path) -> None:
    """Brings the names in a folder to the disk; raises OSError if the disk refuses."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
