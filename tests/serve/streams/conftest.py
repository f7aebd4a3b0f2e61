"""One small artefact with ring memory, and streams of it that are advanced without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes import Session
from tests.xl_export.serve.core.driver import Driver
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Task

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
