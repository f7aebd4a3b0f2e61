"""Rows of a memory: taken out, put back and joined in place, or refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes


def numbered(session: Session, batch: int, first: int = 1) -> Memory:
    """A memory in which row b holds the number first + b everywhere."""
    memory = session.start(batch)
    for row in range(batch):
        memory.positions[row] = first + row
        for array in memory.tensors.values():
            array[row] = first + row
    return memory


def held(memory: Memory) -> list[int]:
    """The number of each row; every array must hold the same."""
    for array in memory.tensors.values():
        assert (array.reshape(memory.batch, -1) == memory.positions[:, None]).all()
    return [int(number) for number in memory.positions]


def test_rows_go_where_they_are_sent(session: Session) -> None:
    memory, other = numbered(session, 4), numbered(session, 2, first=7)
    assert held(memory.select([2, 0])) == [3, 1]
    assert held(memory.select(np.array([1, 1, 3]))) == [2, 2, 4]  # type: ignore[arg-type]
    assert held(memory.join(other)) == [1, 2, 3, 4, 7, 8]
    assert held(memory.join(memory)) == [1, 2, 3, 4, 1, 2, 3, 4]
    memory.replace([3, 0], other)
    assert held(memory) == [8, 2, 3, 7]
    memory.replace([1, 0, 3, 2], memory)
    assert held(memory) == [2, 8, 7, 3]
    assert held(other) == [7, 8]


def test_what_is_taken_out_is_independent_and_what_is_put_in_is_in_place(session: Session) -> None:
    tokens, memory = np.full((3, 2), 5), numbered(session, 3)
    session.step(tokens, memory)
    arrays, positions, binding = dict(memory.tensors), memory.positions, memory.binding
    new = numbered(session, 1, first=9)
    for made in (memory.select([0]), memory.join(new)):
        made.positions[:] = 50
        for array in made.tensors.values():
            array[:] = 50
        session.step(tokens[: made.batch] if made.batch < 3 else np.full((4, 2), 5), made)
    assert memory.positions.tolist() == [3, 4, 5]
    memory.replace([1], new)
    assert all(memory.tensors[name] is array for name, array in arrays.items())
    assert (memory.positions is positions, memory.binding is binding) == (True, True)
    said, _ = session.step(tokens, memory)
    alone, _ = session.step(tokens[:1], numbered(session, 1, first=9))
    assert np.abs(said[1] - alone[0]).max() < 1e-4


def test_rows_that_are_not_numbers_keep_the_memory_unsure(session: Session) -> None:
    sound, spoiled = session.start(2), session.start(1)
    spoiled.unsure = True
    assert not sound.select([0]).unsure
    assert spoiled.select([0]).unsure
    assert sound.join(spoiled).unsure
    sound.replace([1], spoiled)
    assert sound.unsure


def broken(memory: Memory) -> Memory:
    name = next(iter(memory.tensors))
    memory.tensors[name] = memory.tensors[name][:1]
    return memory


def read_only(memory: Memory) -> Memory:
    next(iter(memory.tensors.values())).flags.writeable = False
    return memory


def of_another(memory: Memory) -> Memory:
    memory.owner = "another"
    return memory


def wider(memory: Memory) -> Memory:
    memory.tensors = {name: array.astype(np.float64) for name, array in memory.tensors.items()}
    return memory


REFUSED: dict[str, tuple[Callable[[Memory, Memory], Any], str]] = {
    "beyond": (lambda m, o: m.select([0, 3]), "row 3 is not there; expected 0 to 2"),
    "negative": (lambda m, o: m.select([-1]), "row -1 is not there"),
    "none": (lambda m, o: m.select([]), "expected a list of row numbers"),
    "booleans": (lambda m, o: m.select([True, False, True]), "expected a list of row numbers"),
    "a number": (lambda m, o: m.select(1), "expected a list of row numbers"),  # type: ignore[arg-type]
    "uneven": (lambda m, o: m.select([[0], [0, 1]]), "expected a list of row numbers"),  # type: ignore[list-item]
    "twice": (lambda m, o: m.replace([1, 1], o), r"rows are \[1, 1\] and the other memory has 2"),
    "too few": (lambda m, o: m.replace([1], o), r"rows are \[1\] and the other memory has 2"),
    "beyond, replaced": (lambda m, o: m.replace([1, 5], o), "row 5 is not there"),
    "another's": (lambda m, o: m.replace([0, 1], of_another(o)), "belong to two artefacts"),
    "another's, joined": (lambda m, o: m.join(of_another(o)), "belong to two artefacts"),
    "wider": (lambda m, o: m.replace([0, 1], wider(o)), "different names, types or shapes"),
    "broken": (lambda m, o: m.replace([0, 1], broken(o)), "does not have 2 rows"),
    "broken, joined": (lambda m, o: m.join(broken(o)), "does not have 2 rows"),
    "no memory": (lambda m, o: m.replace([0], None), "the memory is of type NoneType"),  # type: ignore[arg-type]
    "no memory, joined": (lambda m, o: m.join(None), "the memory is of type NoneType"),  # type: ignore[arg-type]
    "too many": (lambda m, o: m.select([0] * 65537), "batch is 65537; expected 1 to 65536 rows"),
    "read-only": (lambda m, o: read_only(m).replace([0, 1], o), "is read-only"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(what: str, session: Session) -> None:
    memory, other = numbered(session, 3), numbered(session, 2, first=7)
    use, message = REFUSED[what]
    with pytest.raises(StreamError, match=message) as error:
        use(memory, other)
    assert "\n" not in str(error.value)
    assert held(memory) == [1, 2, 3]
    with memory.in_use(), other.in_use():  # neither is left locked
        pass


def test_more_rows_than_this_machine_can_hold_are_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, other = numbered(session, 3), numbered(session, 2, first=7)
    row = row_bytes(session.state)
    monkeypatch.setattr("runtimes.base.machine.memory_bytes", lambda: 4 * row)
    for use in (lambda: memory.join(other), lambda: memory.select([0] * 5)):
        with pytest.raises(StreamError, match="the memory of 5 streams takes about"):
            use()
    assert held(memory.select([0] * 4)) == [1] * 4
    monkeypatch.setattr("runtimes.contract.memory.MAX_BATCH", 4)
    with pytest.raises(StreamError, match="batch is 5; expected 1 to 4 rows"):
        memory.join(other)


def test_rows_of_a_memory_in_use_stay(session: Session) -> None:
    memory, other = numbered(session, 2), numbered(session, 2, first=7)
    for used in (memory, other):
        with used.in_use():
            for use in (lambda: memory.replace([0, 1], other), lambda: memory.join(other)):
                with pytest.raises(StreamError, match="another thread is using this memory"):
                    use()
            with pytest.raises(StreamError, match="another thread is using this memory"):
                used.select([0])
    assert held(memory) == [1, 2]
