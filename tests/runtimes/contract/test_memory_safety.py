"""One memory, one thread; and nothing runs over arrays that are not a session's own."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract.checks import load_memory
from runtimes.contract.memory import Memory, save_memory
from runtimes.contract.session import Session

Spoil = Callable[[np.ndarray], np.ndarray]


def test_two_threads_that_step_one_memory_are_refused_or_right(session: Session, tokens: np.ndarray) -> None:
    """Without the lock this ends the process within a few steps."""
    memory, refused, steps = session.start(2), [0], [0]
    batch = np.stack([tokens[:8], tokens[8:16]])
    together = threading.Barrier(2)

    def step_often() -> None:
        together.wait()
        for _ in range(60):
            try:
                session.step(batch, memory)
                steps[0] += 1
            except StreamError as error:
                assert "another thread is using this memory" in str(error)  # noqa: PT017
                refused[0] += 1

    threads = [threading.Thread(target=step_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps[0] + refused[0] == 120
    assert memory.positions.tolist() == [8 * steps[0]] * 2


def test_a_memory_in_use_is_not_copied_saved_or_pickled(session: Session, tmp_path: Path) -> None:
    memory = session.start(1)
    uses: list[Callable[[], object]] = [
        memory.copy,
        lambda: save_memory(memory, tmp_path / "stream"),
        lambda: pickle.dumps(memory),
        lambda: session.step(np.zeros((1, 1), np.int64), memory),
    ]
    with memory.in_use():
        for use in uses:
            with pytest.raises(StreamError, match="another thread is using this memory"):
                use()
    for use in uses:
        use()
    assert [path.name for path in tmp_path.iterdir()] == ["stream"]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def mapped(array: np.ndarray) -> np.ndarray:
    """A read-only map of a file, which ends the process that writes to it."""
    path = Path(os.environ["PYTEST_MAP"])
    array.tofile(path)
    return np.memmap(path, array.dtype, mode="r", shape=array.shape)


def mapped_to_write(array: np.ndarray) -> np.ndarray:
    """A map of a file that a step would write to."""
    path = Path(os.environ["PYTEST_MAP"])
    array.tofile(path)
    return np.memmap(path, array.dtype, mode="r+", shape=array.shape)


def misaligned(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.nbytes + 1, np.uint8)
    return room[1:].view(array.dtype).reshape(array.shape)


SPOILED: dict[str, Spoil] = {
    "read-only": read_only,
    "map": mapped,
    "map to write": mapped_to_write,
    "misaligned": misaligned,
    "view": lambda array: np.concatenate([array, array])[: len(array)],
    "other bytes first": lambda array: array.astype(array.dtype.newbyteorder()),
    "wider": lambda array: array.astype(np.float64),
    "columns first": np.asfortranarray,
    "list": lambda array: array.tolist(),
    "shorter": lambda array: array[..., :-1].copy(),
    "nothing": lambda array: None,  # type: ignore[return-value]
}


@pytest.mark.parametrize("what", SPOILED)
def test_arrays_that_a_step_must_not_write_to_are_refused(
    what: str, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_MAP", str(tmp_path / "map"))
    memory, token = session.start(2), np.zeros((2, 1), np.int64)
    session.step(token, memory)
    before = memory.copy()
    name = session.state[-1].name  # not a tensor of bytes, which have no order
    memory.tensors[name] = SPOILED[what](memory.tensors[name])
    with pytest.raises(StreamError, match=f"the memory's {name} is"):
        session.step(token, memory)
    assert memory.positions.tolist() == [1, 1]
    memory.tensors[name] = before.tensors[name]
    session.step(token, memory)


@pytest.mark.parametrize("what", ["read-only", "view", "other bytes first", "list", "nothing"])
def test_positions_that_a_step_must_not_write_to_are_refused(what: str, session: Session) -> None:
    memory = session.start(2)
    memory.positions = SPOILED[what](memory.positions)
    with pytest.raises(StreamError, match="positions are not a writeable int64 array"):
        session.step(np.zeros((2, 1), np.int64), memory)


@pytest.mark.parametrize("what", [None, "memory", {"positions": 1}, np.zeros(3)])
def test_what_is_no_memory_is_refused(what: object, session: Session) -> None:
    for use in (session.step, session.predict):
        with pytest.raises(StreamError, match=r"the memory is of type \w+; use memory from start\(\)"):
            use(np.zeros((1, 1), np.int64), what)  # type: ignore[arg-type]


def floats(memory: Memory) -> list[np.ndarray]:
    """The arrays that can hold what is not a number."""
    return [array for array in memory.tensors.values() if array.dtype.kind == "f"]


def test_a_row_that_starts_again_does_not_see_what_was_not_a_number(
    session: Session, tokens: np.ndarray
) -> None:
    """A text that overflowed leaves NaN in its row; the next text in that row must not see it."""
    batch = np.stack([tokens[:8], tokens[8:16]])
    memory = session.start(2)
    expected, _ = session.step(batch, session.start(2))
    for bad in (np.nan, np.inf):
        session.step(batch, memory)
        for array in floats(memory):
            array[1] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what NumPy says of NaN
            logits, _ = session.step(batch, memory)
        assert not np.isfinite(logits[1]).all()
        assert np.isfinite(logits[0]).all()
        memory.positions[:] = 0
        logits, _ = session.step(batch, memory)
        assert np.abs(logits - expected).max() < 1e-4
        fork = memory.copy()
        assert isinstance(fork, Memory)
        assert not fork.unsure


def test_rows_that_changed_places_do_not_bring_what_was_not_a_number(
    session: Session, tokens: np.ndarray
) -> None:
    batch = np.stack([tokens[:8], tokens[8:16]])
    expected, _ = session.step(batch, session.start(2))
    memory = session.start(2)
    session.step(batch, memory)
    for array in floats(memory):
        array[1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.step(batch, memory)
    for name, array in memory.tensors.items():
        memory.tensors[name] = array[[1, 0]]
    for row in (1, 0):  # first the row that is sound
        memory.positions[row] = 0
        logits, _ = session.step(batch, memory)
        assert np.abs(logits[row] - expected[row]).max() < 1e-4


def test_a_session_that_was_forked_is_refused_in_a_sentence(session: Session, tokens: np.ndarray) -> None:
    """Its threads are not in the copy: without the check a run in PyTorch waits for them for ever."""
    session.step(tokens[None, :8], session.start(1))
    shorter = dataclasses.replace(session.rule, mem_len=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has several threads
        child = os.fork()
    if child == 0:  # no exception may leave the child, which would run the rest of the tests
        try:
            if session.spec is None:  # its other rules share its weights, and its threads
                session = session.with_rule(shorter)
            session.step(tokens[None, :8], session.start(1))
            os._exit(1)
        except StreamError as error:
            os._exit(0 if "before the process was forked" in str(error) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_row_that_is_not_a_number_is_refused_when_it_is_saved(
    session: Session, tokens: np.ndarray, tmp_path: Path
) -> None:
    batch = np.stack([tokens[:8], tokens[8:16]])
    expected, memory = session.step(batch, session.start(2))
    for array in floats(memory):
        array[1] = np.nan
    with pytest.raises(StreamError, match="row 1 of the memory holds values that are not finite"):
        save_memory(memory, tmp_path / "stream")
    assert list(tmp_path.iterdir()) == []
    memory.positions[1] = 0
    save_memory(memory, tmp_path / "stream")
    loaded = load_memory(tmp_path / "stream", session)
    logits, _ = session.step(batch, loaded)
    assert np.abs(logits[1] - expected[1]).max() < 1e-4
