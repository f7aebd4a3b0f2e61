"""The streams of a store, which of their states are in RAM, and operations on them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.facts import (
    ClosedStoreError,
    DamagedStreamError,
    JournalError,
    StoreFacts,
    StoreSettings,
    StreamFacts,
    UnreadableError,
)
from xl_export.serve.streams.folder import StreamFolder

LOG = logging.getLogger(__name__)


@dataclass
class Stream:
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


@dataclass(frozen=True)
class Damaged:
    """A folder that holds no whole stream. It is left as it is, and counts for its owner, until the operator
    of the server removes it.
    """

    id: str
    #: None if that cannot be read either.
    owner: str | None

    def concerns(self, owner: str) -> bool:
        """Whether a tenant may know of it. If the owner is unknown, any tenant with its random name may."""
        return self.owner in (None, owner)


def facts_of(stream: Stream) -> StreamFacts:
    """What a client may know of a stream."""
    return StreamFacts(
        id=stream.id,
        owner=stream.owner,
        position=stream.folder.position,
        created=stream.created,
        used=stream.used,
        in_ram=stream.state is not None,
        busy=stream.busy,
    )


class StreamIndex:
    """What a store and its operations share.

    row_bytes: of the memory of a stream. lock: of all that is here; it is taken after the lock of a stream,
    never before it, and never held while the disk is used. closed: whether another process may have the
    folder by now. read, written: snapshots.
    """

    def __init__(self, session: Session, *, key: bytes, settings: StoreSettings) -> None:
        self.session = session
        self.key = key
        self.settings = settings
        self.row_bytes = row_bytes(session.state)
        self.lock = threading.Lock()
        self.streams: dict[str, Stream] = {}
        self.damaged: dict[str, Damaged] = {}
        self.closed = False
        self.read = self.written = 0
        self._ram: OrderedDict[str, int] = OrderedDict()  # bytes by id, the one used longest ago first
        self._ram_bytes = 0

    @property
    def totals(self) -> StoreFacts:
        """What the store holds and has done since it was opened."""
        with self.lock:
            return StoreFacts(
                streams=len(self.streams),
                damaged=len(self.damaged),
                in_ram=len(self._ram),
                ram_bytes=self._ram_bytes,
                snapshot_bytes=sum(stream.folder.snapshot_bytes for stream in self.streams.values()),
                journal_bytes=sum(stream.folder.journal_bytes for stream in self.streams.values()),
                read=self.read,
                written=self.written,
            )

    def refuse_closed(self) -> None:
        """Raises ClosedStoreError once the store is closed."""
        if self.closed:
            raise ClosedStoreError("the server has ended, and the stream stays as it was; ask again later.")

    def in_ram(self, name: str, state: StreamState | None) -> None:
        """Counts the bytes of a stream in RAM as those used last; None if it has left."""
        self._ram_bytes -= self._ram.pop(name, 0)
        if state is not None:
            self._ram[name] = state.num_bytes
            self._ram_bytes += state.num_bytes

    def make_room(self) -> None:
        """Takes idle states out of RAM until the others fit, the one that was used longest ago first.

        It never fails: the caller has done what was asked, and must be able to report that.
        """
        while True:
            with self.lock:
                idle = (name for name in self._ram if not self.streams[name].busy)
                victim = next(idle, None) if self._ram_bytes > self.settings.ram_bytes else None
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
        if stream.gone or state is None or not stream.folder.appended:
            return
        try:
            stream.folder.replace(state, key=self.key)
            self.written += 1
        except Exception as error:
            LOG.warning("the snapshot of %s was not written (%s); its journal is kept", stream.id, error)


class Operation:
    """One operation on a stream, from `StreamStore.begin`. One thread at a time may use it."""

    def __init__(self, index: StreamIndex, stream: Stream) -> None:
        self._index = index
        self.stream = stream

    def end(self) -> None:
        """Lets others use the stream."""
        with self._index.lock:
            self.stream.busy = False

    @property
    def facts(self) -> StreamFacts:
        """What is known of the stream, as it is once this operation has ended."""
        return replace(facts_of(self.stream), busy=False)

    def ready(self) -> StreamState | None:
        """The stream as it is now, if it is in RAM; does not use the disk or wait for it."""
        with self._index.lock:
            state = self.stream.state
            if state is not None:  # from here on it stays, even if another thread was taking it out
                self._index.in_ram(self.stream.id, state)
        return state

    def load(self) -> tuple[StreamState, list[np.ndarray]]:
        """A state of the stream, and the appends that have to be fed to it, each as one task, to get the
        stream as it is now; uses the disk. Call `caught_up` after them. Raises DamagedStreamError.
        """
        index = self._index
        stream = self.stream
        with stream.lock:
            if stream.state is not None:
                self._hold(stream.state)
                return stream.state, []
            try:
                state = stream.folder.read(index.session, key=index.key)
            except UserError as error:
                LOG.error("the stored stream in %s is damaged: %s", stream.folder.path, error)
                cause = error.__cause__
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                    raise UnreadableError(stream.id) from error
                raise DamagedStreamError(stream.id) from error
            index.read += 1
            appended = list(stream.folder.appended)
            if not appended:
                self._hold(state)
        index.make_room()
        return state, appended

    def caught_up(self, state: StreamState) -> None:
        """The stream as it is now was computed from what `load` gave; uses the disk, to make room."""
        with self.stream.lock:
            assert state.position == self.stream.folder.position
            self._hold(state)
        self._index.make_room()

    def commit(self, state: StreamState, *, appended: np.ndarray | None = None) -> None:
        """The stream is now in this state, and the disk has it when this returns; uses the disk.

        appended: int64 [N], if the operation fed these tokens to the state before, as one task, and did
        nothing else. Raises UnwritableError for a full disk; the stream is then as it was before.
        """
        index = self._index
        folder = self.stream.folder
        with self.stream.lock:
            index.refuse_closed()
            few = appended is not None and folder.num_appended + len(appended) <= index.settings.replayed
            if few and appended is not None:
                if len(appended):
                    folder.append(appended)
            else:
                folder.replace(state, key=index.key)
                index.written += 1
            assert folder.position == state.position, (folder.position, state.position)
            # Under the lock: a thread that writes a snapshot now must not write an older state.
            self._hold(state)
        index.make_room()

    def snapshot(self) -> BinaryIO:
        """The snapshot of the stream as an open file, which stays what it is; `load` and what follows it come
        first. Uses the disk. Raises JournalError if the stream needs to be loaded first.
        """
        with self.stream.lock:
            if self.stream.folder.appended:
                if self.stream.state is None:
                    raise JournalError(self.stream.id, self.stream.folder.num_appended)
                self._index.refuse_closed()
                self.stream.folder.replace(self.stream.state, key=self._index.key)
                self._index.written += 1
            return self.stream.folder.open_snapshot()

    def _hold(self, state: StreamState) -> None:
        """Keeps the state in RAM, as the one that was used last."""
        self.stream.state = state
        with self._index.lock:
            self._index.in_ram(self.stream.id, state)
