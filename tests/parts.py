"""Slices of the rows of one memory, stepped in any order: each row gets what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest

from runtimes import Memory, Session
from runtimes.base.errors import StreamError

ROWS = 5


def rows_of(memory: Memory) -> list[list[bytes]]:
    """The bits of each row."""
    arrays = [memory.positions, *memory.tensors.values()]
    return [[np.asarray(array)[row].tobytes() for array in arrays] for row in range(memory.batch)]


def check_parts(session: Session, steps: int = 6, *, seed: int = 0) -> None:
    """Steps random slices of a memory. Rows outside of the slice keep every bit, and those inside get what a
    memory of their own gets.
    """
    chance, longest = np.random.default_rng(seed), session.rule.segment
    memory, alone = session.start(ROWS), [session.start(1) for _ in range(ROWS)]
    arrays = dict(memory.tensors)
    for _ in range(steps):
        first, last = sorted(chance.choice(ROWS + 1, 2, replace=False).tolist())
        if chance.random() < 0.2:
            row = int(chance.integers(ROWS))
            memory.positions[row] = alone[row].positions[0] = 0
        tokens = chance.integers(
            session.vocab.size, size=(last - first, int(chance.integers(1, longest + 1)))
        )
        before = rows_of(memory)
        said, part = session.step(tokens, memory.part(first, last))
        assert part is memory.part(first, last)
        after = rows_of(memory)
        for row in range(ROWS):
            assert (before[row] == after[row]) == (not first <= row < last), row
        for row in range(first, last):
            expected, _ = session.step(tokens[row - first : row - first + 1], alone[row])
            assert np.abs(said[row - first] - expected[0]).max() < 1e-4
            assert memory.positions[row] == alone[row].positions[0]
    assert all(memory.tensors[name] is array for name, array in arrays.items())


def refuses_parts(session: Session) -> None:
    """A session that keeps memory on a device takes no part, and its memory has none afterwards."""
    memory, token = session.start(2), np.zeros((1, 1), np.int64)
    with pytest.raises(StreamError, match="this session keeps memory on a device"):
        session.step(token, memory.part(1, 2))
    session.step(np.zeros((2, 1), np.int64), memory)
    with pytest.raises(StreamError, match="the memory lies on a device"):
        memory.part(0, 1)
    assert memory.positions.tolist() == [1, 1]
