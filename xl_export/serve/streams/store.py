"""The streams that a server has promised to keep, most of them idle.

Every operation is written before it is answered, so a server that is killed at any moment loses only
operations that were not answered. The states that were used last are also in RAM, within a bound; the others
are read from the database when they are asked for.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from runtimes.base.errors import UserError
from runtimes.base.files import writing
from runtimes.base.lock import only_writer
from runtimes.contract.memory_identity import Owner
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.database import (
    Appended,
    Database,
    StepInputs,
    Stream,
)
from xl_export.serve.streams.snapshot import read_snapshot

LOG = logging.getLogger(__name__)
JOURNAL_BYTES = 1 << 15  # largest journal to which inputs of steps are added


class NoStreamError(UserError):
    """There is no stream of that name, or it belongs to another API key."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no stream {name!a:.60}; see GET /v1/streams for yours.")


class BusyStreamError(UserError):
    """Another operation is using the stream."""


class ClosedStoreError(UserError):
    """The server has ended."""


class JournalError(UserError):
    """A stream has no whole snapshot, and the server has no model that could make one."""


class TooManyStreamsError(UserError):
    """An API key has reached its limit of streams, or of their bytes."""


class StreamStore:
    """Streams by owner and name. All methods may be called from any thread; those that use the disk say so,
    and belong on a thread of their own.

    Locks are taken in this order: the lock of a stream, the lock of the database, the lock of the store.
    """

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        """Continues what an earlier server left in `folder`; uses the disk. Raises UserError while another
        process uses the folder, and for a database that cannot be read.
        """
        self.settings = settings
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(only_writer(folder, doing="keeping streams"))
        self._database = Database(folder, flush=settings.flush)
        self._lock = threading.Lock()  # never held while the disk is used
        self._streams = {(stream.owner, stream.id): stream for stream in self._database.streams()}
        damaged = self._database.sweep()
        for stream in self._streams.values():
            stream.damaged = stream.key in damaged
            if stream.damaged:
                LOG.error("the stream %s is damaged: the file of its snapshot is missing", stream.id)
        self._making: Counter[str] = Counter()  # streams that are being made, by owner
        self._closed = False
        self._ram: OrderedDict[Stream, int] = OrderedDict()  # bytes of the states, the oldest first
        self._ram_bytes = 0

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each metric."""
        streams = self.all()
        snapshots = sum(stream.snapshot_bytes for stream in streams)
        journals = sum(stream.journal_bytes for stream in streams)
        yield "streams", "Streams that are kept.", len(streams)
        damaged = sum(stream.damaged for stream in streams)
        yield "streams_damaged", "Streams that are damaged on the disk, as far as known.", damaged
        yield "streams_in_memory", "Streams whose state is in memory.", len(self._ram)
        yield "streams_memory_bytes", "Bytes of these states.", self._ram_bytes
        yield "stream_snapshot_bytes", "Bytes of snapshots; forks may share one, and each counts.", snapshots
        yield "stream_journal_bytes", "Bytes of journals.", journals
        database = self._database
        yield "stream_snapshots_read_total", "Snapshots that were read.", database.snapshots_read
        yield "stream_snapshots_written_total", "Snapshots that were written.", database.snapshots_written

    def all(self) -> Sequence[Stream]:
        """The streams of all owners."""
        with self._lock:
            return [*self._streams.values()]

    def find(self, name: str, owner: str) -> Stream:
        """The stream of an owner; raises NoStreamError."""
        stream = self._streams.get((owner, name))
        if stream is None:
            raise NoStreamError(name)
        return stream

    def list(self, owner: str) -> list[Stream]:
        """The streams of an owner, the oldest first."""
        found = [stream for stream in list(self._streams.values()) if stream.owner == owner]
        return sorted(found, key=lambda each: (each.created, each.id))

    def refuse_more(self, owner: str, num_bytes: int = 0) -> None:
        """Raises TooManyStreamsError if an owner may not have one more stream of `num_bytes`."""
        self.refuse_closed()
        held = self.list(owner)
        making = self._making[owner]
        used = sum(stream.snapshot_bytes for stream in held) + making * num_bytes
        most = self.settings
        if len(held) + making >= most.streams or used + num_bytes > most.owner_bytes:
            raise TooManyStreamsError(
                f"you have {len(held) + making:,} streams with {used:,} bytes, and may have {most.streams:,} "
                f"with {most.owner_bytes:,} bytes; delete some of them, or save them as snapshots first."
            )

    def create(self, owner: str, state: StreamState, name: str | None = None) -> Stream:
        """A new stream in this state; uses the disk.

        name: a random one if it is None. Raises TooManyStreamsError, BusyStreamError if there is a stream of
        that name, and UnwritableError for a full disk.
        """
        with self._place(owner, state.num_bytes):
            return self._created(owner, state, name)

    @contextlib.contextmanager
    def receiving(self, owner: str, session: Session) -> Iterator[BinaryIO]:
        """A file for a snapshot that arrives, which counts as a stream of its owner until the block ends.
        Raises TooManyStreamsError.
        """
        with self._place(owner, row_bytes(session.state)), self._database.upload() as file:
            yield file

    def restore(self, file: BinaryIO, owner: str, session: Session) -> Stream:
        """A new stream from a snapshot that was received; uses the disk. Raises as `read_snapshot`, and
        UnwritableError.
        """
        return self._created(owner, read_snapshot(file, session, adopt=self.settings.adopt))

    def fork(self, name: str, owner: str) -> Stream:
        """A new stream in the state of another one; uses the disk a little.

        While an operation runs on the other one, it is the state before that operation.
        """
        stream = self.find(name, owner)
        with self._place(owner, stream.snapshot_bytes), stream.lock:
            self._refuse_gone(stream)
            stream.used = now = time.time()
            fork = replace(
                stream, id=_random_name(), created=now, busy=False, cancel=None, lock=threading.Lock()
            )
            self._database.fork(stream, fork)
        return self._added(fork)

    def delete(self, name: str, owner: str) -> None:
        """Removes a stream for ever; uses the disk. Raises BusyStreamError while an operation runs."""
        with self.operation(name, owner) as operation:
            operation.remove()

    @contextlib.contextmanager
    def operation(self, name: str, owner: str) -> Iterator[Operation]:
        """An operation on a stream: until the block ends no other one uses the stream. Without a `commit` the
        stream stays as it was. Raises NoStreamError, and BusyStreamError if another operation runs.
        """
        stream = self.find(name, owner)
        with self._lock:
            self._refuse_gone(stream)
            if stream.busy:
                raise BusyStreamError(
                    f"another operation is using the stream {name}; wait for its answer and ask again."
                )
            stream.busy = True
            stream.used = time.time()
        try:
            yield Operation(self, self._database, stream)
        finally:
            with self._lock:
                stream.busy = False
                stream.cancel = None

    def close(self, *, within: float = 5.0) -> None:
        """Waits for operations to end, writes snapshots of streams that are ahead of theirs, both within some
        seconds, and gives the folder back. Uses the disk.

        Operations that have not ended by then are lost. What has no snapshot in time is in the journal: it is
        fed again when the stream is used.
        """
        end = time.monotonic() + within
        while time.monotonic() < end and self._is_used:
            time.sleep(0.01)
        self._closed = True
        for stream in list(self._streams.values()):
            # Another thread may be writing this stream: the folder is given back with the end of the process.
            if not stream.lock.acquire(timeout=max(0.0, end - time.monotonic())):
                return
            try:
                if time.monotonic() < end:
                    self._write_ahead(stream)
            finally:
                stream.lock.release()
        self._database.close()
        self._stack.close()

    @property
    def _is_used(self) -> bool:
        """Whether an operation runs or a stream is being made."""
        with self._lock:
            return self._making.total() > 0 or any(stream.busy for stream in self._streams.values())

    @contextlib.contextmanager
    def _place(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Counts a stream that is made while the block runs; raises TooManyStreamsError."""
        with self._lock:
            self.refuse_more(owner, num_bytes)
            self._making[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._making[owner] -= 1

    def _created(self, owner: str, state: StreamState, name: str | None = None) -> Stream:
        """Adds a stream, for which there is a place."""
        now = time.time()
        adopted = str(state.memory.adopted[0])
        stream = Stream(name or _random_name(), owner, now, now, state.memory.owner, adopted, state=state)
        if adopted:
            LOG.warning("the stream %s continues with other weights than %s", stream.id, adopted)
        try:
            self._database.insert(stream, state)
        except sqlite3.IntegrityError:
            raise BusyStreamError(f"another request has just made {stream.id}; ask again.") from None
        return self._added(stream)

    def _added(self, stream: Stream) -> Stream:
        with self._lock:
            self._streams[stream.owner, stream.id] = stream
        if stream.state is not None:
            self.hold(stream, stream.state)
        self.make_room()
        return stream

    def refuse_closed(self) -> None:
        """Raises ClosedStoreError once the store is closed."""
        if self._closed:
            raise ClosedStoreError("the server has ended, and the stream stays as it was; ask again later.")

    def _refuse_gone(self, stream: Stream) -> None:
        self.refuse_closed()
        if self._streams.get((stream.owner, stream.id)) is not stream:
            raise NoStreamError(stream.id)

    def forget(self, stream: Stream) -> None:
        """The stream is no more; the caller has its lock."""
        with self._lock:
            del self._streams[stream.owner, stream.id]
            self._leave(stream)
            stream.state = None  # a thread that makes room writes no snapshot of it

    def hold(self, stream: Stream, state: StreamState) -> None:
        """Keeps the state in RAM as the one that was used last."""
        with self._lock:
            self._leave(stream)
            stream.state = state
            self._ram[stream] = state.num_bytes
            self._ram_bytes += state.num_bytes

    def _leave(self, stream: Stream) -> None:
        self._ram_bytes -= self._ram.pop(stream, 0)

    def make_room(self) -> None:
        """Takes idle states out of RAM until the others fit, the one that was used longest ago first.

        It never fails: the caller has done what was asked, and must be able to report that.
        """
        while True:
            with self._lock:
                full = self._ram_bytes > self.settings.ram_bytes
                stream = next((each for each in self._ram if not each.busy), None) if full else None
                if stream is None:
                    return
                self._leave(stream)
            with stream.lock:
                if not self._closed:
                    self._write_ahead(stream)
                with self._lock:
                    if stream not in self._ram:  # an operation may have brought it back meanwhile
                        stream.state = None

    def _write_ahead(self, stream: Stream) -> None:
        """Writes a snapshot if a stream is ahead of it; the caller has its lock. A snapshot that cannot be
        written is logged and loses nothing: the journal has what the old one lacks.
        """
        if stream.state is None or not stream.ahead:
            return
        try:
            self._database.replace(stream, stream.state)
        except Exception as error:
            LOG.warning("the snapshot of %s was not written (%s); its journal is kept", stream.id, error)


class Operation:
    """One operation on a stream, from `StreamStore.operation`. One thread at a time may use it."""

    def __init__(self, store: StreamStore, database: Database, stream: Stream) -> None:
        self._store = store
        self._database = database
        self.stream = stream

    def ready(self) -> StreamState | None:
        """The stream as it is now, if it is in RAM; does not use the disk or wait for it."""
        state = self.stream.state
        if state is not None:  # from here on it stays, even if another thread was taking it out
            self._store.hold(self.stream, state)
        return state

    def load(self, session: Session) -> tuple[StreamState, list[Appended]]:
        """A state of the stream, and what has to be fed to it, each as one task, to get the stream as it is
        now; uses the disk. Call `caught_up` then. Raises DamagedStreamError and UnreadableError.
        """
        stream = self.stream
        with stream.lock:
            if stream.state is not None:
                return stream.state, []
            return self._database.load(stream, session, adopt=self._store.settings.adopt)

    def caught_up(self, state: StreamState) -> None:
        """The stream as it is now was computed from what `load` gave; uses the disk, to make room."""
        with self.stream.lock:
            assert state.position == self.stream.position
            self._store.hold(self.stream, state)
        self._store.make_room()

    def commit(self, state: StreamState, *, appended: Appended | None = None) -> None:
        """The stream is now in this state, and the disk has it when this returns; uses the disk.

        appended: what the operation fed to the state before, as one task or step, if it did nothing else.
        Raises UnwritableError for a full disk; the stream is then as it was before.
        """
        stream = self.stream
        with stream.lock:
            self._store.refuse_closed()
            if appended is not None and self._journal_has_room(appended, state.memory.owner):
                if len(appended):
                    self._database.append(stream, appended)
            else:
                self._database.replace(stream, state)
            assert stream.position == state.position, (stream.position, state.position)
            # Under the lock: a thread that writes a snapshot now must not write an older state.
            self._store.hold(stream, state)
        self._store.make_room()

    def snapshot(self) -> BinaryIO:
        """The snapshot of the stream as an open file, which stays what it is; `load` and what follows it come
        first if a model continues the stream. Uses the disk. Raises JournalError if there was none.
        """
        stream = self.stream
        with stream.lock:
            if stream.ahead:
                if stream.state is None:
                    raise JournalError(
                        f"the last {stream.ahead:,} tokens of the stream {stream.id} are not in its snapshot "
                        "yet, and this server has no model to bring them there; serve its model again, and "
                        "ask for the snapshot then."
                    )
                self._store.refuse_closed()
                self._database.replace(stream, stream.state)
            return self._database.open_snapshot(stream)

    def remove(self) -> None:
        """Removes the stream for ever; uses the disk."""
        with self.stream.lock:
            self._store.refuse_closed()
            self._database.delete(self.stream)
            self._store.forget(self.stream)

    def _journal_has_room(self, fed: Appended, computed_by: Owner) -> bool:
        """Whether it can be added to the journal: what one model was fed gives the same state again."""
        stream = self.stream
        size = sum(array.nbytes for array in fed.arrays.values()) if isinstance(fed, StepInputs) else 0
        fits = size == 0 or stream.journal_bytes + size <= JOURNAL_BYTES
        return (
            fits
            and computed_by == stream.computed_by
            and stream.ahead + len(fed) <= self._store.settings.replayed
        )


def _random_name() -> str:
    return f"stream-{secrets.token_hex(12)}"
