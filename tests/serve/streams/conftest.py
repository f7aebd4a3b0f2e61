"""One small artefact with ring memory, and streams of it that are advanced without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes import Session
from xl_export.serve.core.state import StreamState

KEY = bytes(range(32))
Advance = Callable[[StreamState, np.ndarray], StreamState]


@pytest.fixture(scope="session")
def session(artefacts: dict[str, Path]) -> Session:
    return runtimes.open_session(artefacts["ring"], threads=1)


@pytest.fixture
def fresh(session: Session) -> StreamState:
    """A stream that has seen nothing."""
    return StreamState(memory=session.start(1), logits=None, tail=np.empty(0, np.int64), written=0)


@pytest.fixture(scope="session")
def advance(session: Session) -> Advance:
    """`advance(state, tokens)` → the state after them, cut as an engine cuts them; `state` stays as it is."""

    def feed(state: StreamState, tokens: np.ndarray) -> StreamState:
        memory, logits, written = state.memory.copy(), state.logits, state.written
        for at in range(0, len(tokens), session.rule.segment):
            piece = tokens[at : at + session.rule.segment]
            padded = min(session.rule.segment, 1 << (len(piece) - 1).bit_length())
            written = max(written, int(memory.positions[0]) + padded)
            row = np.pad(piece, (0, padded - len(piece)))[None]
            logits, _ = session.predict(row, memory, lengths=np.array([len(piece)]))
            logits = logits[0]
        tail = np.concatenate([state.tail, tokens])[-session.rule.segment - 1 :]
        return StreamState(memory=memory, logits=logits, tail=tail, written=written)

    return feed


def assert_same(state: StreamState, other: StreamState) -> None:
    """Two states are equal bit for bit."""
    assert state.position == other.position
    assert state.written == other.written
    np.testing.assert_array_equal(state.tail, other.tail)
    assert (state.logits is None) == (other.logits is None)
    if state.logits is not None:
        np.testing.assert_array_equal(state.logits, other.logits)
    assert state.memory.tensors.keys() == other.memory.tensors.keys()
    for name, tensor in state.memory.tensors.items():
        np.testing.assert_array_equal(tensor, other.memory.tensors[name])
