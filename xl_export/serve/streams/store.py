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
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtimes.base.errors import UserError
from runtimes.base.files import writing
from runtimes.base.lock import only_writer
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.facts import (
    BusyStreamError,
    ClosedStoreError,
    StoreFacts,
    StoreSettings,
    StreamFacts,
    TooManyStreamsError,
    no_stream,
)
from xl_export.serve.streams.folder import StreamFolder, sweep
from xl_export.serve.streams.snapshot import read_snapshot

LOG = logging.getLogger(__name__)


@dataclass
class _Stream:
    """A stream of the index. The lock is held while its files are used; `busy` lasts a whole operation."""

    id: str
    owner: str
    created: float
    used: float
    folder: StreamFolder
    state: StreamState | None = field(default=None, repr=False)
    busy: bool = False
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class StreamStore:
    """Streams by id, each of one owner. All methods may be called from any thread; those that may use the
    disk say so, and belong into a thread of their own.
    """

    def __init__(self, folder: Path, session: Session, *, key: bytes, settings: StoreSettings) -> None:
        """Takes over what an earlier server left in `folder`; uses the disk.

        Streams of several artefacts may lie in one folder: each store sees its own. Raises UserError while
        another process uses it.
        """
        self._session, self._key, self._settings = session, key, settings
        self._path = folder / session.identity[:32]
        self._lock = threading.Lock()  # of the index; taken after the lock of a stream, never before it
        self._streams: dict[str, _Stream] = {}
        self._ram: OrderedDict[str, int] = OrderedDict()  # bytes by id, the one used longest ago first
        self._read = self._written = self._ram_bytes = 0
        self._making: Counter[str] = Counter()  # streams of each owner that are being made
        self.damaged: list[str] = []  # sentences about folders that hold no whole stream; they are left alone
        self._closed = False
        self._stack = contextlib.ExitStack()
        with writing(self._path):
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stack.enter_context(only_writer(self._path, doing="keeping streams"))
        sweep(self._path)
        for path in sorted(each for each in self._path.iterdir() if each.is_dir()):
            try:
                opened, facts = StreamFolder.open(path)
                stream = _Stream(path.name, str(facts["owner"]), float(facts["created"]), 0.0, opened)
            except (UserError, KeyError, TypeError, ValueError) as error:
                self.damaged.append(f"{path.name}: {error}")
                continue
            stream.used = stream.created
            self._streams[path.name] = stream

    def create(self, owner: str, state: StreamState) -> StreamFacts:
        """A new stream in this state, which is on the disk when this returns; uses the disk.

        Raises TooManyStreamsError, and UnwritableError for a full disk; no stream has appeared then.
        """
        with self._new(owner) as (name, facts):
            folder = StreamFolder.create(self._path / name, state, facts, key=self._key)
            self._written += 1
            stream = self._add(name, owner, facts["created"], folder, state)
        self._make_room()
        return self._facts(stream)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Path]:
        """A file in the folder of the store for a snapshot that arrives; it is gone when the block ends."""
        path = self._path / f".{secrets.token_hex(12)}.upload"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def restore(self, owner: str, path: Path) -> StreamFacts:
        """A new stream from the file of a snapshot; uses the disk. Raises as `read_snapshot` and `create`."""
        return self.create(owner, read_snapshot(path, self._session, key=self._key))

    def fork(self, name: str, owner: str) -> StreamFacts:
        """A new stream in the state of another one, which goes on by itself; uses the disk a little."""
        with self.operation(name, owner) as source:
            stream = source.stream
            with self._new(owner) as (other, facts), stream.lock:
                self._refuse_closed()
                folder = stream.folder.fork(self._path / other, facts)
                fork = self._add(other, owner, facts["created"], folder, stream.state)
        self._make_room()
        return self._facts(fork)

    def facts(self, name: str, owner: str) -> StreamFacts:
        """What is known of a stream; raises NoStreamError."""
        return self._facts(self._owned(name, owner))

    def list(self, owner: str) -> list[StreamFacts]:
        """The streams of an owner, the oldest first."""
        with self._lock:
            found = [stream for stream in self._streams.values() if stream.owner == owner]
        return [self._facts(stream) for stream in sorted(found, key=lambda each: (each.created, each.id))]

    def delete(self, name: str, owner: str) -> None:
        """Removes a stream for ever; uses the disk. Raises BusyStreamError while an operation runs."""
        with self.operation(name, owner) as operation, operation.stream.lock:
            self._refuse_closed()
            operation.stream.folder.delete()
            operation.stream.gone = True
            with self._lock:
                self._streams.pop(name, None)
                self._in_ram(name, None)

    def begin(self, name: str, owner: str) -> Operation:
        """An operation on a stream: until its `end` nobody else uses the stream. Without a `commit` the
        stream stays as it was. Raises NoStreamError, and BusyStreamError where another operation runs.
        """
        stream = self._owned(name, owner)
        with self._lock:
            if stream.gone:
                raise no_stream(name)
            self._refuse_closed()
            if stream.busy:
                raise BusyStreamError(
                    f"another operation is using the stream {name}; wait for its answer, or fork the stream."
                )
            stream.busy, stream.used = True, time.time()
        return Operation(self, stream)

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
        with self._lock:
            self._closed = True
        all_written = True
        for stream in list(self._streams.values()):
            # Another thread may be writing this stream: the folder is given back after that, or with the end
            # of the process.
            if not stream.lock.acquire(timeout=max(0.0, end - time.monotonic())):
                all_written = False
                continue
            try:
                if time.monotonic() < end:
                    self._write_ahead(stream)
            finally:
                stream.lock.release()
        if all_written:
            self._stack.close()

    @property
    def _is_used(self) -> bool:
        """Whether an operation runs or a stream is being made."""
        with self._lock:
            making = any(self._making.values())
            return making or any(stream.busy for stream in self._streams.values())

    @property
    def totals(self) -> StoreFacts:
        """What the store holds and has done since it was opened."""
        with self._lock:
            return StoreFacts(
                streams=len(self._streams),
                in_ram=len(self._ram),
                ram_bytes=self._ram_bytes,
                read=self._read,
                written=self._written,
            )

    def _refuse_closed(self) -> None:
        """Raises ClosedStoreError where another process may have the folder by now."""
        if self._closed:
            raise ClosedStoreError("the server has ended, and the stream stays as it was; ask again later.")

    def _owned(self, name: str, owner: str) -> _Stream:
        with self._lock:
            stream = self._streams.get(name)
        if stream is None or stream.owner != owner:  # whether it is somebody else's is not told
            raise no_stream(name)
        return stream

    def _facts(self, stream: _Stream) -> StreamFacts:
        return StreamFacts(
            id=stream.id,
            owner=stream.owner,
            position=stream.folder.position,
            created=stream.created,
            used=stream.used,
            in_ram=stream.state is not None,
            busy=stream.busy,
        )

    def refuse_more(self, owner: str, *, making: bool = False) -> None:
        """Raises TooManyStreamsError where a tenant has as many streams as it may have.

        making: whether one more is being made from now on.
        """
        row = sum(tensor.num_bytes(batch=1) for tensor in self._session.state)
        most = min(self._settings.streams, self._settings.tenant_bytes // max(row, 1))
        with self._lock:
            self._refuse_closed()
            held = sum(stream.owner == owner for stream in self._streams.values()) + self._making[owner]
            if held >= most:
                raise TooManyStreamsError(
                    f"you have {held:,} streams of {row:,} bytes each, and may have {most:,}; delete some of "
                    "them, or save them as snapshots first."
                )
            if making:
                self._making[owner] += 1

    @contextlib.contextmanager
    def _new(self, owner: str) -> Iterator[tuple[str, dict[str, object]]]:
        """The name and the facts of a stream to be made, within the bounds of its owner."""
        name = f"stream-{secrets.token_hex(12)}"
        self.refuse_more(owner, making=True)
        try:
            yield name, {"owner": owner, "created": time.time()}
        finally:
            with self._lock:
                self._making[owner] -= 1

    def _add(
        self, name: str, owner: str, created: object, folder: StreamFolder, state: StreamState | None
    ) -> _Stream:
        assert isinstance(created, float)
        stream = _Stream(name, owner, created, created, folder, state)
        with self._lock:
            self._streams[name] = stream
            if state is not None:
                self._in_ram(name, state)
        return stream

    def _in_ram(self, name: str, state: StreamState | None) -> None:
        """Counts the bytes of a stream in RAM as those used last; None where it has left."""
        self._ram_bytes -= self._ram.pop(name, 0)
        if state is not None:
            self._ram[name] = state.num_bytes
            self._ram_bytes += state.num_bytes

    def _make_room(self) -> None:
        """Takes idle states out of RAM until the others fit, the one that was used longest ago first.

        It never fails: whoever calls it has done what was asked, and must be able to say so.
        """
        while True:
            with self._lock:
                idle = (name for name in self._ram if not self._streams[name].busy)
                victim = next(idle, None) if self._ram_bytes > self._settings.ram_bytes else None
                if victim is None:
                    return
                stream = self._streams[victim]
                self._in_ram(victim, None)
            with stream.lock:
                if not (stream.gone or self._closed):
                    self._write_ahead(stream)
                with self._lock:
                    if stream.id not in self._ram:  # an operation may have brought it back meanwhile
                        stream.state = None

    def _write_ahead(self, stream: _Stream) -> None:
        """Writes a snapshot where a stream is ahead of it, under the lock of the stream. A snapshot that
        cannot be written is logged and loses nothing: the journal has what the old one has not.
        """
        state = stream.state
        if stream.gone or state is None or not stream.folder.appended:
            return
        try:
            stream.folder.replace(state, key=self._key)
            self._written += 1
        except Exception as error:
            LOG.warning("the snapshot of %s was not written (%s); its journal is kept", stream.id, error)


class Operation:
    """One operation on a stream, from `StreamStore.begin`. One thread at a time may use it."""

    def __init__(self, store: StreamStore, stream: _Stream) -> None:
        self._store, self.stream = store, stream

    def end(self) -> None:
        """Lets others use the stream."""
        with self._store._lock:
            self.stream.busy = False

    @property
    def facts(self) -> StreamFacts:
        """What is known of the stream, as it is once this operation has ended."""
        return replace(self._store._facts(self.stream), busy=False)

    def ready(self) -> StreamState | None:
        """The stream as it is now, where it is in RAM; uses no disk, and waits for nobody who does."""
        with self._store._lock:
            state = self.stream.state
            if state is not None:  # from here on it stays, also where another thread was taking it out
                self._store._in_ram(self.stream.id, state)
        return state

    def load(self) -> tuple[StreamState, list[np.ndarray]]:
        """A state of the stream, and the appends that have to be fed to it, each as one task, to get the
        stream as it is now; uses the disk. Call `caught_up` after them.
        """
        store, stream = self._store, self.stream
        with stream.lock:
            if stream.state is not None:
                return stream.state, []
            state = stream.folder.read(store._session, key=store._key)
            store._read += 1
            appended = list(stream.folder.appended)
            if not appended:
                self._hold(state)
        store._make_room()
        return state, appended

    def caught_up(self, state: StreamState) -> None:
        """The stream as it is now was computed from what `load` gave; uses the disk, to make room."""
        with self.stream.lock:
            assert state.position == self.stream.folder.position
            self._hold(state)
        self._store._make_room()

    def commit(self, state: StreamState, *, appended: np.ndarray | None = None) -> None:
        """The stream is now in this state, and the disk has it when this returns; uses the disk.

        appended: int64 [N], where the operation fed these tokens to the state before, as one task, and did
        nothing else. Raises UnwritableError for a full disk; the stream is then as it was before.
        """
        store, folder = self._store, self.stream.folder
        with self.stream.lock:
            store._refuse_closed()
            few = appended is not None and folder.num_appended + len(appended) <= store._settings.replayed
            if few and appended is not None:
                if len(appended):
                    folder.append(appended, flush=store._settings.flush)
            else:
                folder.replace(state, key=store._key)
                store._written += 1
            assert folder.position == state.position, (folder.position, state.position)
            self._hold(state)  # under the lock: whoever writes a snapshot now must not write an older state
        store._make_room()

    def snapshot(self) -> BinaryIO:
        """The snapshot of the stream as an open file, which stays what it is; `load` and what follows it come
        first. Uses the disk.
        """
        with self.stream.lock:
            if self.stream.folder.appended:
                assert self.stream.state is not None
                self._store._refuse_closed()
                self.stream.folder.replace(self.stream.state, key=self._store._key)
                self._store._written += 1
            return self.stream.folder.open_snapshot()

    def _hold(self, state: StreamState) -> None:
        """Keeps the state in RAM, as the one that was used last."""
        self.stream.state = state
        with self._store._lock:
            self._store._in_ram(self.stream.id, state)
