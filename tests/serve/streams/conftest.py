"""One small artefact with ring memory, and streams of it that are advanced without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes import Session
from tests.xl_export.serve.core.driver import Driver
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Task
from xl_export.serve.streams import database
from xl_export.serve.streams.store import Operation, StreamStore

Advance = Callable[[StreamState, np.ndarray], StreamState]


@pytest.fixture(scope="session")
def session(artefacts: dict[str, Path]) -> Session:
    return runtimes.open_session(artefacts["ring"], threads=1)


@pytest.fixture
def fresh(session: Session) -> StreamState:
    """A stream that has seen nothing."""
    return StreamState.begin(session)


@pytest.fixture(scope="session")
def advance(session: Session) -> Advance:
    """`advance(state, tokens)` → the state after them, from a scheduler; `state` stays as it is."""
    driver = Driver(session, rows=1)

    def feed(state: StreamState, tokens: np.ndarray) -> StreamState:
        if not len(tokens):
            return state
        driver.run(task := Task(tokens=np.asarray(tokens, np.int64), state=state, score=True, keep=True))
        after = driver.ended(task).state
        driver.answers.clear()
        assert after is not None
        return after

    return feed


@dataclass(frozen=True)
class Streams:
    """A folder of streams and what a server does to them, without an engine."""

    folder: Path
    session: Session
    fresh: StreamState
    """A stream that has seen nothing."""
    advance: Advance

    def open(self, **sizes: int) -> StreamStore:
        return StreamStore(self.folder, StoreSettings(**sizes))

    def begun(self, tokens: np.ndarray) -> StreamState:
        """A stream that has seen these tokens."""
        return self.advance(self.fresh, tokens)

    def append(self, store: StreamStore, name: str, tokens: np.ndarray) -> None:
        with store.operation(name, "anna") as operation:
            operation.commit(self.advance(self.current(operation), tokens), appended=tokens)

    def current(self, operation: Operation) -> StreamState:
        """The stream as it is now, as a server gets it."""
        ready = operation.ready()
        if ready is not None:
            return ready
        state, appended = operation.load(self.session)
        for tokens in appended:
            assert isinstance(tokens, np.ndarray)
            state = self.advance(state, tokens)
        operation.caught_up(state)
        return state

    def read(self, store: StreamStore, name: str, owner: str = "anna") -> StreamState:
        with store.operation(name, owner) as operation:
            return self.current(operation)


@pytest.fixture(params=[0, 1 << 20])
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of snapshots that lie in the database: none of them, or all."""
    monkeypatch.setattr(database, "INLINE_BYTES", request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def streams(tmp_path: Path, session: Session, fresh: StreamState, advance: Advance) -> Streams:
    return Streams(tmp_path, session, fresh, advance)


def assert_same(state: StreamState, other: StreamState) -> None:
    """Two states are equal bit for bit."""
    assert state.position == other.position
    assert state.furthest == other.furthest
    np.testing.assert_array_equal(state.tail, other.tail)
    assert (state.logits is None) == (other.logits is None)
    if state.logits is not None:
        np.testing.assert_array_equal(state.logits, other.logits)
    assert state.memory.tensors.keys() == other.memory.tensors.keys()
    for name, tensor in state.memory.tensors.items():
        np.testing.assert_array_equal(tensor, other.memory.tensors[name])
