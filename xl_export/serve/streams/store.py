"""The streams of one artefact that a server has promised to keep, most of them idle.

Every operation is written before it is answered. So a server that is killed at any moment loses at most the
operations that were not answered, never the streams before them. A machine that loses its power may lose the
last seconds, which the system had not brought to the disk yet; with `StoreSettings.flush` an append is there
before it is answered. The states that were used last are also in RAM, within a bound; the others come back
from the disk when they are asked for.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from runtimes.base.errors import UserError
from runtimes.base.files import read_json, writing
from runtimes.base.lock import only_writer
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.files import FACTS, StreamFolder, flush_folder, sweep
from xl_export.serve.streams.index import (
    BusyStreamError,
    ClosedStoreError,
    DamagedStreamError,
    JournalError,
    NoStreamError,
    Operation,
    StoreSettings,
    Stream,
    StreamIndex,
    TooManyStreamsError,
)
from xl_export.serve.streams.snapshot import read_snapshot

LOG = logging.getLogger(__name__)
IDENTITY = 32  # digits of the identity of an artefact that name the folder of its streams


class ByOwner:
    """The streams in the folder of an artefact, as their owners know them."""

    path: Path
    #: By name.
    streams: dict[str, Stream]
    #: The owners of folders that hold no whole stream, by name; None if that cannot be read either. They are
    #: left as they are, and count for their owner, until the operator of the server removes them.
    damaged: dict[str, str | None]

    @property
    def identity(self) -> str:
        """The artefact: the first 32 digits of its identity."""
        return self.path.name

    def find(self, name: str, owner: str) -> Stream:
        """The stream of an owner; raises NoStreamError, and DamagedStreamError."""
        # If the owner of a damaged stream is unknown, any client with its random name may know of it.
        if name in self.damaged and self.damaged[name] in (None, owner):
            raise DamagedStreamError(name)
        stream = self.streams.get(name)
        if stream is None or stream.owner != owner:  # that it is somebody else's stays hidden
            raise NoStreamError(name)
        return stream

    def list(self, owner: str) -> list[Stream]:
        """The streams of an owner, the oldest first."""
        found = [stream for stream in list(self.streams.values()) if stream.owner == owner]
        return sorted(found, key=lambda each: (each.created, each.id))

    def count(self, owner: str) -> int:
        """How many streams an owner has, also damaged ones."""
        return len(self.list(owner)) + list(self.damaged.values()).count(owner)


class Upload(NamedTuple):
    """A snapshot that arrives."""

    #: Of the file that it is written to.
    path: Path
    #: Of the stream that is made of it.
    name: str


class StreamStore(ByOwner, StreamIndex):
    """Streams by id, each of one owner. All methods may be called from any thread; those that may use the
    disk say so, and belong in a thread of their own.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        *,
        key: bytes,
        settings: StoreSettings,
        elsewhere: Callable[[str], tuple[int, int]] = lambda owner: (0, 0),
    ) -> None:
        """Takes over what an earlier server left in `folder`; uses the disk.

        Streams of several artefacts may lie in one folder: each store sees its own. elsewhere: how many
        streams an owner has in the others, and their bytes; they count for its limits. Raises UserError while
        another process uses the folder.
        """
        self._elsewhere = elsewhere
        super().__init__(session, key=key, settings=settings)
        self.path = folder / session.identity[:IDENTITY]
        #: Ends the operation that runs on a stream early, by the name of the stream.
        self.cancels: dict[str, Callable[[], None]] = {}
        self._making: dict[str, str] = {}  # the owners of streams that are being made, by their names
        self._stack = contextlib.ExitStack()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if settings.flush:
                for each in (folder, folder.parent):  # the names of the folders that may be new
                    flush_folder(each)
        self._stack.enter_context(only_writer(self.path, doing="keeping streams"))
        sweep(self.path)
        self.streams, self.damaged = stored(self.path, flush=settings.flush)

    def create(self, owner: str, state: StreamState, name: str | None = None) -> Stream:
        """A new stream in this state, which is on the disk when this returns; uses the disk.

        name: a random one if it is None. Raises TooManyStreamsError, BusyStreamError if there is a stream of
        that name, and UnwritableError for a full disk; no stream has appeared then.
        """
        with self._new(owner, name) as name:
            return self._create(name, owner, state)

    @contextlib.contextmanager
    def receiving(self, owner: str) -> Iterator[Upload]:
        """A place for a snapshot that arrives, which counts as a stream of its owner until the block ends.
        Raises TooManyStreamsError. What was received is gone when the block ends.
        """
        with self._new(owner) as name:
            path = self.path / f".{name}.upload"
            try:
                yield Upload(path, name)
            finally:
                path.unlink(missing_ok=True)

    def restore(self, upload: Upload, owner: str) -> Stream:
        """A new stream from a snapshot that has arrived; uses the disk, and raises as `read_snapshot` and
        `create`.
        """
        return self._create(upload.name, owner, read_snapshot(upload.path, self.session, key=self.key))

    def _create(self, name: str, owner: str, state: StreamState) -> Stream:
        created = time.time()
        facts = {"owner": owner, "created": created}
        folder = StreamFolder.create(self.path / name, state, facts, key=self.key, flush=self.settings.flush)
        self.written += 1
        return self._added(Stream(name, owner, created, created, folder, state))

    def fork(self, name: str, owner: str) -> Stream:
        """A new stream in the state of another one, which goes on by itself; uses the disk a little.

        While an operation runs on the other one, it is the state before that operation: its files and what is
        in RAM change together, under its lock, when the operation is done.
        """
        stream = self.find(name, owner)
        with self._new(owner) as other:
            with stream.lock:
                self.refuse_closed()
                if stream.gone:
                    raise NoStreamError(name)
                stream.used = time.time()
                assert isinstance(stream.files, StreamFolder)
                folder = stream.files.fork(self.path / other, {"owner": owner, "created": stream.used})
                fork = Stream(other, owner, stream.used, stream.used, folder, stream.state)
            return self._added(fork)

    def delete(self, name: str, owner: str) -> None:
        """Removes a stream for ever; uses the disk. Raises BusyStreamError while an operation runs."""
        with self.operation(name, owner) as operation:
            self.remove(operation)

    def begin(self, name: str, owner: str) -> Operation:
        """See `start`."""
        stream = self.find(name, owner)
        with self.lock:
            return self.start(stream)

    @contextlib.contextmanager
    def operation(self, name: str, owner: str) -> Iterator[Operation]:
        """`begin`, and its `end` when the block ends, however it ends."""
        operation = self.begin(name, owner)
        try:
            yield operation
        finally:
            operation.end()

    def close(self, *, within: float = 5.0) -> None:
        """Waits for operations to end, writes snapshots of streams that are ahead of theirs, both within some
        seconds, and gives the folder back. Uses the disk.

        Operations that have not ended by then are lost. What has no snapshot in time is in journals: it is
        fed again when the stream is used.
        """
        end = time.monotonic() + within
        while time.monotonic() < end and self._is_used:
            time.sleep(0.01)
        with self.lock:
            self.closed = True
        all_written = True
        for stream in list(self.streams.values()):
            # Another thread may be writing this stream: the folder is given back after that, or with the end
            # of the process.
            if not stream.lock.acquire(timeout=max(0.0, end - time.monotonic())):
                all_written = False
                continue
            try:
                if time.monotonic() < end:
                    self.write_ahead(stream)
            finally:
                stream.lock.release()
        if all_written:
            self._stack.close()

    def held(self, owner: str) -> tuple[int, int]:
        """How many streams an owner has here, those that are being made among them, and their bytes."""
        count = self.count(owner)
        return count, count * self.row_bytes

    def open_snapshot(self, name: str, owner: str) -> BinaryIO:
        """The snapshot of a stream as an open file; uses the disk. Raises JournalError if that needs the
        model.
        """
        with self.operation(name, owner) as operation:
            return operation.snapshot()

    def unserved(self) -> UnservedStreams:
        """The streams of this store, which was closed."""
        return UnservedStreams(self.path, self.streams, self.damaged)

    @property
    def _is_used(self) -> bool:
        """Whether an operation runs or a stream is being made."""
        with self.lock:
            return bool(self._making) or any(stream.busy for stream in self.streams.values())

    def refuse_more(self, owner: str, *, making: str | None = None) -> None:
        """Raises TooManyStreamsError if an owner has as many streams as it may have.

        making: the name of one more that is being made from now on; raises BusyStreamError if there is one.
        """
        row = self.row_bytes
        settings = self.settings
        others, their_bytes = self._elsewhere(owner)
        most = min(settings.streams, others + max(0, settings.owner_bytes - their_bytes) // max(row, 1))
        with self.lock:
            self.refuse_closed()
            count = others + self.count(owner)
            if count >= most:
                raise TooManyStreamsError(
                    f"you have {count:,} streams with {their_bytes + (count - others) * row:,} bytes, and "
                    f"may have {most:,}; delete some of them, or save them as snapshots first."
                )
            if making is None:
                return
            if making in self._making or making in self.streams:
                raise BusyStreamError(f"another request has just made the stream {making}; ask again.")
            self._making[making] = owner

    def count(self, owner: str) -> int:
        """How many streams an owner has, also damaged ones and those that are being made."""
        return super().count(owner) + sum(each == owner for each in list(self._making.values()))

    @contextlib.contextmanager
    def _new(self, owner: str, name: str | None = None) -> Iterator[str]:
        """The name of a stream that is made while the block runs, within the bounds of its owner."""
        name = name or f"stream-{secrets.token_hex(12)}"
        self.refuse_more(owner, making=name)
        try:
            yield name
        finally:
            with self.lock:
                del self._making[name]

    def _added(self, stream: Stream) -> Stream:
        with self.lock:
            self.streams[stream.id] = stream
            if stream.state is not None:
                self.in_ram(stream.id, stream.state)
        self.make_room()
        return stream


class UnservedStreams(ByOwner):
    """The streams of one artefact that is not served. All methods may be called from any thread.

    A server keeps them, and no model of it can go on with them. They stay as they lie on the disk until a
    server of their artefact takes them over again. Until then they are listed, count for their owner, are
    given as snapshots, and are deleted if their owner asks for it.
    """

    def __init__(self, path: Path, streams: dict[str, Stream], damaged: dict[str, str | None]) -> None:
        """path: the folder of the artefact's streams. streams, damaged: those in it."""
        self.path = path
        self.streams = {
            each.id: Stream(each.id, each.owner, each.created, each.used, each.files)  # without their states
            for each in streams.values()
        }
        self.damaged = damaged
        #: Whether a store has taken the folder over.
        self.closed = False
        #: Held while a stream is deleted, and while a store takes the folder over.
        self.lock = threading.Lock()

    @staticmethod
    def read(path: Path) -> UnservedStreams | None:
        """The streams in a folder; None if another process is using them. Uses the disk."""
        try:
            with only_writer(path, doing="listing streams"):
                return UnservedStreams(path, *stored(path))
        except UserError:
            return None

    def held(self, owner: str) -> tuple[int, int]:
        """How many streams an owner has here, also damaged ones, and the bytes of the others' snapshots."""
        return self.count(owner), sum(stream.files.snapshot_bytes for stream in self.list(owner))

    def open_snapshot(self, name: str, owner: str) -> BinaryIO:
        """The snapshot of a stream as an open file; uses the disk. Raises NoStreamError, and JournalError
        if it is not the whole stream.
        """
        files = self.find(name, owner).files
        if files.appended:
            raise JournalError(name, files.num_appended)
        try:
            return files.open_snapshot()
        except OSError as error:  # another process has removed it
            raise NoStreamError(name) from error

    def delete(self, name: str, owner: str) -> None:
        """Removes a stream for ever; uses the disk. Raises BusyStreamError while another process uses the
        folder, and ClosedStoreError once a store has taken it over.
        """
        with self.lock, contextlib.ExitStack() as stack:
            if self.closed:
                raise ClosedStoreError("the artefact of the stream was just opened; ask again.")
            try:
                stack.enter_context(only_writer(self.path, doing="deleting a stream"))
            except UserError as error:
                raise BusyStreamError(
                    f"another process on the server's machine uses the stream {name}; ask again when it has "
                    "ended."
                ) from error
            self.find(name, owner).files.delete()
            del self.streams[name]


def stored(path: Path, *, flush: bool = False) -> tuple[dict[str, Stream], dict[str, str | None]]:
    """The streams in the folder of an artefact, and the owners of those that are damaged, which are logged.
    Uses the disk; the caller is the only writer there.
    """
    streams = {}
    damaged = {}
    for each in sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."):
        try:
            folder, facts = StreamFolder.open(each, flush=flush)
            created = float(facts["created"])
            used = max(created, folder.written_at)
            streams[each.name] = Stream(each.name, str(facts["owner"]), created, used, folder)
        except (OSError, UserError, KeyError, TypeError, ValueError) as error:
            LOG.error("the stored stream in %s is damaged: %s", each, error or type(error).__name__)
            damaged[each.name] = _owner(each)
    return streams, damaged


def _owner(path: Path) -> str | None:
    """The owner of a damaged stream, if the facts in its folder have it."""
    try:
        return str(read_json(path / FACTS)["owner"])
    except (OSError, UserError, KeyError, TypeError):
        return None
