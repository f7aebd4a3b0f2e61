"""One operation on a stored stream: its state, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import BinaryIO

import numpy as np

from runtimes.base.errors import UserError
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.facts import DamagedStreamError, JournalError, StreamFacts, UnreadableError
from xl_export.serve.streams.index import LOG, Stream, StreamIndex, facts_of


class Operation:
    """One operation on a stream, from `StreamStore.begin`. One thread at a time may use it."""

    def __init__(self, index: StreamIndex, stream: Stream) -> None:
        self._index, self.stream = index, stream

    def end(self) -> None:
        """Lets others use the stream."""
        with self._index.lock:
            self.stream.busy = False

    @property
    def facts(self) -> StreamFacts:
        """What is known of the stream, as it is once this operation has ended."""
        return replace(facts_of(self.stream), busy=False)

    def ready(self) -> StreamState | None:
        """The stream as it is now, where it is in RAM; uses no disk, and waits for nobody who does."""
        with self._index.lock:
            state = self.stream.state
            if state is not None:  # from here on it stays, also where another thread was taking it out
                self._index.in_ram(self.stream.id, state)
        return state

    def load(self) -> tuple[StreamState, list[np.ndarray]]:
        """A state of the stream, and the appends that have to be fed to it, each as one task, to get the
        stream as it is now; uses the disk. Call `caught_up` after them. Raises DamagedStreamError.
        """
        index, stream = self._index, self.stream
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

        appended: int64 [N], where the operation fed these tokens to the state before, as one task, and did
        nothing else. Raises UnwritableError for a full disk; the stream is then as it was before.
        """
        index, folder = self._index, self.stream.folder
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
            self._hold(state)  # under the lock: whoever writes a snapshot now must not write an older state
        index.make_room()

    def snapshot(self) -> BinaryIO:
        """The snapshot of the stream as an open file, which stays what it is; `load` and what follows it come
        first. Uses the disk. Raises JournalError where nobody has loaded a stream that needs it.
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
