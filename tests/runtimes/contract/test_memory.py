"""Memory as an object: rows are taken out, put back, joined, and stepped in parts.

The matrix in `tests/test_sessions.py` shows that the answers stay right.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract import memory as memory_module
from runtimes.contract.memory import MOST_PARTS, NUMPY_HUGE, Memory, zeros
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes


@pytest.fixture
def session(sessions: dict[str, Session]) -> Session:
    """Of one kind: a memory does not know what steps it."""
    return sessions["ring"]


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


def broken(memory: Memory) -> Memory:
    name = next(iter(memory.tensors))
    memory.tensors[name] = memory.tensors[name][:1]
    return memory


def read_only(memory: Memory) -> Memory:
    next(iter(memory.tensors.values())).flags.writeable = False
    return memory


def of_another(memory: Memory) -> Memory:
    memory.owner = memory.owner._replace(artefact="another")
    return memory


def wider(memory: Memory) -> Memory:
    memory.tensors = {name: array.astype(np.float64) for name, array in memory.tensors.items()}
    return memory


REFUSED: list[tuple[Callable[[Memory, Memory], Any], str]] = [
    (lambda m, o: m.select([0, 3]), "row 3 is not there; expected 0 to 2"),
    (lambda m, o: m.select([-1]), "row -1 is not there"),
    (lambda m, o: m.select([]), "expected a list of row numbers"),
    (lambda m, o: m.select([True, False, True]), "expected a list of row numbers"),
    (lambda m, o: m.select(1), "expected a list of row numbers"),  # type: ignore[arg-type]
    (lambda m, o: m.select([[0], [0, 1]]), "expected a list of row numbers"),  # type: ignore[list-item]
    (lambda m, o: m.select([0] * 65537), "batch is 65537; expected a whole number from 1 to 65536"),
    (lambda m, o: m.replace([1, 1], o), r"rows are \[1, 1\] and the other memory has 2"),
    (lambda m, o: m.replace([1], o), r"rows are \[1\] and the other memory has 2"),
    (lambda m, o: m.replace([1, 5], o), "row 5 is not there"),
    (lambda m, o: m.replace([0, 1], of_another(o)), "belong to two artefacts"),
    (lambda m, o: m.replace([0, 1], wider(o)), "different names, types or shapes"),
    (lambda m, o: m.replace([0, 1], broken(o)), "does not have 2 rows"),
    (lambda m, o: m.replace([0], None), "the memory is of type NoneType"),  # type: ignore[arg-type]
    (lambda m, o: read_only(m).replace([0, 1], o), "is read-only"),
    (lambda m, o: m.join(of_another(o)), "belong to two artefacts"),
    (lambda m, o: m.join(broken(o)), "does not have 2 rows"),
    (lambda m, o: m.join(None), "the memory is of type NoneType"),  # type: ignore[arg-type]
    *(
        (lambda m, o, rows=rows: m.part(*rows), "expected at least one of the rows 0 to 2")
        for rows in ((0, 4), (-1, 2), (2, 2), (3, 1))
    ),
]


def test_rows_that_do_not_fit_are_refused_and_nothing_changes(session: Session) -> None:
    for use, words in REFUSED:
        memory, other = numbered(session, 3), numbered(session, 2, first=7)
        with pytest.raises(StreamError, match=words) as error:
            use(memory, other)
        assert "\n" not in str(error.value)
        assert held(memory) == [1, 2, 3]
        with memory.in_use(), other.in_use():  # neither is left locked
            pass


def test_more_rows_than_this_machine_holds_are_refused(
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
    with pytest.raises(StreamError, match="batch is 5; expected a whole number from 1 to 4"):
        memory.join(other)


# Parts: some rows in place, with the same arrays and one lock.


def test_a_part_of_a_part_belongs_to_the_whole(session: Session) -> None:
    memory = session.start(5)
    part = memory.part(1, 5)
    assert part.part(1, 3) is memory.part(2, 4)
    part.part(1, 3).positions[:] = 7
    assert memory.positions.tolist() == [0, 0, 7, 7, 0]
    assert (part.whole is memory, memory.whole) == (True, None)
    with pytest.raises(StreamError, match="expected at least one of the rows 0 to 3"):
        part.part(0, 5)


def test_a_bounded_number_of_parts_is_kept_with_bindings(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, token = session.start(4), np.zeros((2, 1), np.int64)
    session.step(token, memory.part(0, 2))
    session.step(token, memory.part(2, 4))
    bound = memory.part(0, 2).binding
    assert bound is not None
    session.step(token, memory.part(0, 2))
    assert memory.part(0, 2).binding is bound
    assert MOST_PARTS > 32
    monkeypatch.setattr("runtimes.contract.memory.MOST_PARTS", 2)
    first, last = memory.part(0, 2), memory.part(2, 4)
    memory.part(0, 2)
    memory.part(1, 3)  # in the place of what was asked for longest ago
    assert memory.part(0, 2) is first
    assert memory.part(2, 4) is not last


def test_a_part_and_its_whole_have_one_lock(session: Session) -> None:
    memory = session.start(3)
    part, token = memory.part(0, 2), np.zeros((2, 1), np.int64)
    for used, other in ((memory, part), (part, memory), (part, memory.part(2, 3))):
        with used.in_use(), pytest.raises(StreamError, match="another thread is using this memory"):
            other.copy()
    with memory.in_use(), pytest.raises(StreamError, match="another thread is using this memory"):
        session.step(token, part)
    session.step(token, part)


def test_rows_move_between_a_part_and_its_whole(session: Session) -> None:
    memory = numbered(session, 4, first=0)
    memory.replace([0], memory.part(3, 4))
    memory.part(1, 3).replace([1], memory.part(0, 1))
    assert held(memory) == [3, 1, 3, 3]
    part = memory.part(1, 3)
    for made in (part.copy(), copy.deepcopy(part), part.select([0, 1])):
        made.positions[:] = 9
        assert (made.whole, memory.positions.tolist()) == (None, [3, 1, 3, 3])


def test_a_part_of_exchanged_arrays_is_refused(session: Session) -> None:
    memory, token = session.start(3), np.zeros((2, 1), np.int64)
    part, name = memory.part(0, 2), session.state[0].name
    for _ in range(3):  # from then on its arrays stay bound
        session.step(token, part)
    memory.tensors[name] = memory.tensors[name].copy()
    with pytest.raises(StreamError, match="were exchanged; ask for the part again"):
        session.step(token, part)
    session.step(token, memory.part(0, 2))
    assert memory.positions.tolist() == [4, 4, 0]
    part.tensors[name] = part.tensors[name].copy()
    with pytest.raises(StreamError, match="were exchanged"):
        session.step(token, part)


# What is not finite: a row that overflowed is cleared when a new text begins in it.


def test_rows_that_are_not_finite_keep_the_memory_unsure(session: Session) -> None:
    sound, spoiled = session.start(2), session.start(1)
    spoiled.unsure = True
    assert not sound.select([0]).unsure
    assert spoiled.select([0]).unsure
    assert sound.join(spoiled).unsure
    sound.replace([1], spoiled)
    assert sound.unsure


def test_only_rows_that_start_again_are_cleared(session: Session) -> None:
    memory = numbered(session, 3, first=0)
    for array in memory.tensors.values():
        array[0] = np.nan
    memory.unsure = True
    memory.clear_restarted_rows()
    assert held(memory) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_each_row_has_its_own_mark_of_being_unsure(session: Session, tokens: np.ndarray) -> None:
    """A row that overflowed in one part is cleared when it starts again, in another part too. Stepping a
    sound part, with a row that starts again, leaves the mark of the others.
    """
    batch = np.stack([tokens[8 * row : 8 * row + 8] for row in range(4)])
    expected, _ = session.step(batch, session.start(4))
    memory = session.start(4)
    session.step(batch, memory)
    for array in memory.tensors.values():
        array[3] = np.nan
    session.step(batch[2:], memory.part(2, 4))
    assert (memory.unsure, memory.part(0, 2).unsure, memory.part(1, 3).unsure) == (True, False, True)
    memory.positions[:] = 0
    session.step(batch[:3], memory.part(0, 3))
    assert (memory.unsure, memory.part(0, 3).unsure, memory.select([3]).unsure) == (True, False, True)
    for first, last in ((3, 4), (1, 4)):
        memory.positions[first:last] = 0
        said, _ = session.step(batch[first:last], memory.part(first, last))
        assert np.abs(said - expected[first:last]).max() < 1e-4
    assert not memory.unsure


@pytest.mark.parametrize("kind", ["ring", "torch"])
def test_a_session_that_was_forked_is_refused(
    kind: str, sessions: dict[str, Session], tokens: np.ndarray
) -> None:
    """Its threads are not in the copy: without the check a run in PyTorch waits for them for ever."""
    session = sessions[kind]
    memory = session.start(1)
    session.step(tokens[None, :8], memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has several threads
        child = os.fork()
    if child == 0:  # no exception may leave the child, which would run the rest of the tests
        try:
            if session.spec is None:  # its other rules share its weights, and its threads
                session = session.with_rule(dataclasses.replace(session.rule, mem_len=4))
                memory = session.start(1)
            session.step(tokens[None, :8], memory)
            os._exit(1)
        except StreamError as error:
            os._exit(0 if "before the process was forked" in str(error) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for huge pages")
def test_large_zeros_ask_for_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> None:
        asked.append((address.value or 0, length.value, advice))

    monkeypatch.setattr(memory_module.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    assert not zeros((NUMPY_HUGE // 4 - 1,), np.float32).any()  # NumPy asks for no huge pages here
    assert asked == []
    rings = zeros((16, 1 << 18), np.float32)
    assert not rings.any()
    ((first, length, advice),) = asked
    assert advice == mmap.MADV_NOHUGEPAGE
    assert (first % mmap.PAGESIZE, length % mmap.PAGESIZE) == (0, 0)  # or the kernel refuses
    before, after = first - rings.ctypes.data, rings.ctypes.data + rings.nbytes - first - length
    assert 0 <= before < mmap.PAGESIZE  # every page that holds nothing else
    assert 0 <= after < mmap.PAGESIZE
