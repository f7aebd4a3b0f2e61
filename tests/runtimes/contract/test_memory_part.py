"""A part of a memory is some of its rows in place: the same arrays, one lock, and a mark for each row."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract.memory import MOST_PARTS, DeviceTensor, Memory
from runtimes.contract.session import Session
from tests.parts import check_parts


def test_rows_of_any_slice_get_what_they_get_alone(session: Session) -> None:
    check_parts(session, 40)


def test_a_part_of_a_part_is_a_part_of_the_whole(session: Session) -> None:
    memory = session.start(5)
    part = memory.part(1, 5)
    assert part.part(1, 3) is memory.part(2, 4)
    part.part(1, 3).positions[:] = 7
    assert memory.positions.tolist() == [0, 0, 7, 7, 0]
    assert (part.whole is memory, memory.whole) == (True, None)
    for first, last in ((0, 5), (-1, 2), (2, 2), (3, 1)):
        with pytest.raises(StreamError, match="expected at least one of the rows 0 to 3"):
            part.part(first, last)


def test_a_binding_is_made_once_for_each_slice_and_no_more_are_kept_than_are_bounded(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, token = session.start(4), np.zeros((2, 1), np.int64)
    session.step(token, memory.part(0, 2))
    session.step(token, memory.part(2, 4))
    bound = memory.part(0, 2).binding
    assert (bound is None) == (session.spec is None)  # PyTorch binds nothing
    session.step(token, memory.part(0, 2))
    assert memory.part(0, 2).binding is bound
    assert MOST_PARTS > 32
    monkeypatch.setattr("runtimes.contract.memory.MOST_PARTS", 2)
    first, last = memory.part(0, 2), memory.part(2, 4)
    memory.part(0, 2)
    memory.part(1, 3)  # in the place of what was asked for longest ago
    assert memory.part(0, 2) is first
    assert memory.part(2, 4) is not last


def test_a_part_and_its_whole_are_one_memory_for_threads(session: Session) -> None:
    memory = session.start(3)
    part, token = memory.part(0, 2), np.zeros((2, 1), np.int64)
    for used, other in ((memory, part), (part, memory), (part, memory.part(2, 3))):
        with used.in_use(), pytest.raises(StreamError, match="another thread is using this memory"):
            other.copy()
    with memory.in_use(), pytest.raises(StreamError, match="another thread is using this memory"):
        session.step(token, part)
    session.step(token, part)


def test_rows_move_between_a_part_and_its_whole(session: Session) -> None:
    memory = session.start(4)
    for row in range(4):
        memory.positions[row] = row
        for array in memory.tensors.values():
            array[row] = row
    memory.replace([0], memory.part(3, 4))
    memory.part(1, 3).replace([1], memory.part(0, 1))
    assert memory.positions.tolist() == [3, 1, 3, 3]
    for array in memory.tensors.values():
        assert [float(array[row].min()) for row in range(4)] == [3, 1, 3, 3]
    for made in (
        memory.part(1, 3).copy(),
        copy.deepcopy(memory.part(1, 3)),
        memory.part(1, 3).select([0, 1]),
    ):
        made.positions[:] = 9
        assert (made.whole, memory.positions.tolist()) == (None, [3, 1, 3, 3])


def test_each_row_has_its_own_mark_of_being_unsure(session: Session, tokens: np.ndarray) -> None:
    """A row that overflowed in one part is cleared when it starts again, in another part too; stepping a
    part that is sound, with a row that starts again, does not take the mark from the others.
    """
    batch = np.stack([tokens[8 * row : 8 * row + 8] for row in range(4)])
    expected, _ = session.step(batch, session.start(4))
    memory = session.start(4)
    session.step(batch, memory)
    for array in memory.tensors.values():
        if array.dtype.kind == "f":  # int8 memory has scales, which are floats
            array[3] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what NumPy says of NaN
        session.step(batch[2:], memory.part(2, 4))
    assert (memory.unsure, memory.part(0, 2).unsure, memory.part(1, 3).unsure) == (True, False, True)
    memory.positions[:] = 0
    session.step(batch[:3], memory.part(0, 3))
    assert (memory.unsure, memory.part(0, 3).unsure, memory.select([3]).unsure) == (True, False, True)
    memory.positions[:] = 0
    for first, last in ((3, 4), (1, 4)):
        memory.positions[first:last] = 0
        said, _ = session.step(batch[first:last], memory.part(first, last))
        assert np.abs(said - expected[first:last]).max() < 1e-4
    assert not memory.unsure


def test_parts_of_arrays_that_were_exchanged_are_refused_and_made_again(session: Session) -> None:
    memory, token = session.start(3), np.zeros((2, 1), np.int64)
    part = memory.part(0, 2)
    name = session.state[0].name
    memory.tensors[name] = memory.tensors[name].copy()
    with pytest.raises(StreamError, match="were exchanged; ask for the part again"):
        session.step(token, part)
    session.step(token, memory.part(0, 2))
    assert memory.positions.tolist() == [1, 1, 0]
    part.tensors[name] = part.tensors[name].copy()
    with pytest.raises(StreamError, match="were exchanged"):
        session.step(token, part)


def test_memory_on_a_device_has_no_parts(session: Session) -> None:
    class Elsewhere(DeviceTensor):
        def __init__(self, array: np.ndarray) -> None:
            self.shape, self.dtype = array.shape, array.dtype

    memory: Memory = session.start(3)
    part = memory.part(0, 2)
    name = session.state[0].name
    memory.tensors[name] = Elsewhere(memory.tensors[name])  # type: ignore[assignment]
    with pytest.raises(StreamError, match="the memory lies on a device"):
        memory.part(0, 2)
    with pytest.raises(StreamError, match="were exchanged"):
        session.step(np.zeros((2, 1), np.int64), part)
