"""The streams of a store, which of their states are in RAM, and operations on them.

A server keeps its streams in folders (`StreamStore`), and replicas share a file of each (`SharedStreams`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.files import Appended, SharedFile, StreamFolder

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The bounds of a store."""

    #: Of the states that stay in RAM while they are idle.
    ram_bytes: int = 1 << 30
    #: The most streams of one API key.
    streams: int = 10_000
    #: The most bytes of the streams of one API key.
    owner_bytes: int = 1 << 36
    #: How many appended tokens a stream may be ahead of its snapshot; so many are fed again after a kill.
    replayed: int = 1024
    #: Whether each new stream and each change of one is on the disk before it is answered, so that it also
    #: survives a loss of power. That costs milliseconds for each append on most disks. Without it the system
    #: writes appends within seconds, and a kill of the server loses none.
    flush: bool = False


class NoStreamError(UserError):
    """There is no stream of that name, or it belongs to another API key."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no stream {name!a:.60}; see GET /v1/streams for yours.")


class DamagedStreamError(UserError):
    """The files of the stream are damaged. The log says how: what is wrong names paths of the server."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the stream {name} is damaged on the server's disk and cannot go on; restore a snapshot of it, "
            "or ask the operator of the server, whose log says what is wrong."
        )


class UnreadableError(UserError):
    """The disk did not give the files of the stream, which may be whole; the log says why."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the server could not read the stream {name} from its disk; try again, or ask the operator of "
            "the server, whose log says why."
        )


class BusyStreamError(UserError):
    """Another operation is using the stream."""


class ClosedStoreError(UserError):
    """The server has ended."""


class JournalError(UserError):
    """A stream has no whole snapshot, and the model that could make one is not served."""

    def __init__(self, name: str, appended: int) -> None:
        super().__init__(
            f"the last {appended:,} tokens of the stream {name} are not in its snapshot yet, and only its "
            "own artefact can bring them there; serve that artefact again, and ask for the snapshot then."
        )


class TooManyStreamsError(UserError):
    """An API key has as many streams, or bytes of them, as it may have."""


@dataclass
class Stream:
    """A stream of the index. The lock is held while its files are used; `busy` lasts a whole operation."""

    id: str
    owner: str
    created: float
    used: float
    files: StreamFolder | SharedFile
    state: StreamState | None = field(default=None, repr=False)
    busy: bool = False
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def position(self) -> int:
        """How many tokens it has been fed."""
        return self.files.position


class StreamIndex:
    """The streams of one artefact that a store knows."""

    def __init__(self, session: Session, *, key: bytes, settings: StoreSettings) -> None:
        self.session = session
        self.key = key
        self.settings = settings
        #: Of the memory of a stream.
        self.row_bytes = row_bytes(session.state)
        #: Of all that is here. It is taken after the lock of a stream, never before it, and never held while
        #: the disk is used.
        self.lock = threading.Lock()
        self.streams: dict[str, Stream] = {}
        #: Whether another process may have the folder by now.
        self.closed = False
        #: Snapshots that were read and written.
        self.read = 0
        self.written = 0
        self._ram: OrderedDict[str, int] = OrderedDict()  # bytes by id, the one used longest ago first
        #: Of the states in RAM.
        self.ram_bytes = 0

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each figure, for `/metrics`."""
        with self.lock:
            files = [stream.files for stream in self.streams.values()]
        yield "streams", "Streams that are kept.", len(files)
        yield "streams_in_memory", "Streams whose state is in memory.", len(self._ram)
        yield "streams_memory_bytes", "Bytes of these states.", self.ram_bytes
        on_disk = "on the disk; forks may share the bytes of one, and each counts them."
        snapshot_bytes = sum(each.snapshot_bytes for each in files)
        yield "stream_snapshot_bytes", f"Bytes of the snapshots of streams {on_disk}", snapshot_bytes
        journal_bytes = sum(each.journal_bytes for each in files)
        yield "stream_journal_bytes", "Bytes of the journals of streams on the disk.", journal_bytes
        yield "stream_snapshots_read_total", "Snapshots that were read from the disk.", self.read
        yield "stream_snapshots_written_total", "Snapshots that were written to the disk.", self.written

    def start(self, stream: Stream) -> Operation:
        """An operation on a stream: until its `end` no other one uses the stream. Without a `commit` the
        stream stays as it was. The caller has the lock. Raises NoStreamError, and BusyStreamError if another
        operation runs.
        """
        if stream.gone:
            raise NoStreamError(stream.id)
        self.refuse_closed()
        if stream.busy:
            raise BusyStreamError(
                f"another operation is using the stream {stream.id}; wait for its answer and ask again."
            )
        stream.busy = True
        stream.used = time.time()
        return Operation(self, stream)

    def ended(self, stream: Stream) -> None:
        """Called when an operation on the stream has ended; the caller has the lock."""

    def refuse_closed(self) -> None:
        """Raises ClosedStoreError once the store is closed."""
        if self.closed:
            raise ClosedStoreError("the server has ended, and the stream stays as it was; ask again later.")

    def remove(self, operation: Operation) -> None:
        """Removes the stream of an operation for ever; uses the disk."""
        stream = operation.stream
        with stream.lock:
            self.refuse_closed()
            stream.files.delete()
            stream.gone = True
            with self.lock:
                self.streams.pop(stream.id, None)
                self.in_ram(stream.id, None)

    def in_ram(self, name: str, state: StreamState | None) -> None:
        """Counts the bytes of a stream in RAM as those used last; None if it has left."""
        self.ram_bytes -= self._ram.pop(name, 0)
        if state is not None:
            self._ram[name] = state.num_bytes
            self.ram_bytes += state.num_bytes

    def make_room(self) -> None:
        """Takes idle states out of RAM until the others fit, the one that was used longest ago first.

        It never fails: the caller has done what was asked, and must be able to report that.
        """
        while True:
            with self.lock:
                idle = (name for name in self._ram if not self.streams[name].busy)
                victim = next(idle, None) if self.ram_bytes > self.settings.ram_bytes else None
                if victim is None:
                    return
                stream = self.streams[victim]
                self.in_ram(victim, None)
            with stream.lock:
                if not (stream.gone or self.closed):
                    self.write_ahead(stream)
                with self.lock:
                    if stream.id not in self._ram:  # an operation may have brought it back meanwhile
                        stream.state = None

    def write_ahead(self, stream: Stream) -> None:
        """Writes a snapshot if a stream is ahead of it; the caller has its lock. A snapshot that cannot be
        written is logged and loses nothing: the journal has what the old one lacks.
        """
        state = stream.state
        if stream.gone or state is None or not stream.files.appended:
            return
        try:
            stream.files.replace(state, key=self.key)
            self.written += 1
        except Exception as error:
            LOG.warning("the snapshot of %s was not written (%s); its journal is kept", stream.id, error)


class Operation:
    """One operation on a stream, from `StreamIndex.start`. One thread at a time may use it."""

    def __init__(self, index: StreamIndex, stream: Stream) -> None:
        self._index = index
        self.stream = stream

    def end(self) -> None:
        """Lets others use the stream."""
        with self._index.lock:
            self.stream.busy = False
            self._index.ended(self.stream)

    def ready(self) -> StreamState | None:
        """The stream as it is now, if it is in RAM; does not use the disk or wait for it."""
        with self._index.lock:
            state = self.stream.state
            if state is not None:  # from here on it stays, even if another thread was taking it out
                self._index.in_ram(self.stream.id, state)
        return state

    def load(self) -> tuple[StreamState, list[Appended]]:
        """A state of the stream, and the appends that have to be fed to it, each as one task, to get the
        stream as it is now; uses the disk. Call `caught_up` after them. Raises DamagedStreamError.
        """
        index = self._index
        stream = self.stream
        with stream.lock:
            if stream.state is not None and stream.files.is_newest():
                self._hold(stream.state)
                return stream.state, []
            try:
                state = stream.files.read(index.session, key=index.key)
            except UserError as error:
                LOG.error("the stored stream in %s is damaged: %s", stream.files.path, error)
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                    raise UnreadableError(stream.id) from error
                raise DamagedStreamError(stream.id) from error
            index.read += 1
            appended = list(stream.files.appended)
            if not appended:
                self._hold(state)
        index.make_room()
        return state, appended

    def caught_up(self, state: StreamState) -> None:
        """The stream as it is now was computed from what `load` gave; uses the disk, to make room."""
        with self.stream.lock:
            assert state.position == self.stream.files.position
            self._hold(state)
        self._index.make_room()

    def commit(self, state: StreamState, *, appended: Appended | None = None) -> None:
        """The stream is now in this state, and the disk has it when this returns; uses the disk.

        appended: what the operation fed to the state before, as one task or step, if it did nothing else.
        Raises UnwritableError for a full disk; the stream is then as it was before.
        """
        index = self._index
        files = self.stream.files
        with self.stream.lock:
            index.refuse_closed()
            most = index.settings.replayed
            if (
                appended is not None
                and isinstance(files, StreamFolder)
                and files.has_room(appended, replayed=most)
            ):
                if len(appended):
                    files.append(appended)
            else:
                files.replace(state, key=index.key)
                index.written += 1
            assert files.position == state.position, (files.position, state.position)
            # Under the lock: a thread that writes a snapshot now must not write an older state.
            self._hold(state)
        index.make_room()

    def snapshot(self) -> BinaryIO:
        """The snapshot of the stream as an open file, which stays what it is; `load` and what follows it come
        first. Uses the disk. Raises JournalError if the stream needs to be loaded first.
        """
        with self.stream.lock:
            if self.stream.files.appended:
                if self.stream.state is None:
                    raise JournalError(self.stream.id, self.stream.files.num_appended)
                self._index.refuse_closed()
                self.stream.files.replace(self.stream.state, key=self._index.key)
                self._index.written += 1
            return self.stream.files.open_snapshot()

    def _hold(self, state: StreamState) -> None:
        """Keeps the state in RAM, as the one that was used last."""
        self.stream.state = state
        with self._index.lock:
            self._index.in_ram(self.stream.id, state)
