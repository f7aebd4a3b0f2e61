"""Steps of one kind reuse arrays that stay bound; `tests/test_sessions.py` has their matrix."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.memory import Memory
from runtimes.sessions.onnx_runtime import OrtSession


def test_every_kind_of_step_follows_every_other(artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts["ring"], threads=1)
    empty = partial(session.predict, lengths=np.array([0]))
    kinds = (session.step, session.predict, lambda given, memory: session.score(given, given, memory), empty)
    for before, after in itertools.product(kinds, repeat=2):
        memory = session.start(1)
        before(np.array([[3]]), memory)
        for token in (5, 2):  # other tokens and targets than the arrays hold
            given = np.array([[token]])
            anew = memory.copy()  # which has no arrays of a step
            np.testing.assert_array_equal(after(given, memory)[0], after(given, anew)[0])


def test_arrays_of_earlier_steps_stay_as_they_were(artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts["ring"], threads=1)
    for step in (session.step, session.predict, partial(session.score, np.array([[3]]))):
        memory = session.start(1)
        arrays = []
        for token in (1, 2, 3):
            given = np.array([[token]])
            found, _ = step(given, memory)
            arrays += [(given, given.copy()), (found, found.copy())]
        for array, before in arrays:
            np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("form", ["ring", "hidden"])
def test_arrays_that_the_caller_exchanges_are_read(form: str, artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts[form], threads=1)
    token, memory = np.array([[3]]), session.start(1)
    for name in ("positions", *memory.tensors):
        for _ in range(3):
            session.predict(token, memory)
        if name == "positions":
            memory.positions = memory.positions + 1
        else:
            memory.tensors[name] = np.zeros_like(memory.tensors[name])
        anew = memory.copy()
        np.testing.assert_array_equal(session.predict(token, memory)[0], session.predict(token, anew)[0])


def test_a_row_restarts_clean_after_values_that_are_not_finite(artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts["ring"], threads=1)
    token, memory = np.array([[3]]), session.start(1)
    for _ in range(4):
        session.predict(token, memory)
    for array in memory.tensors.values():
        array[:] = np.nan
    session.predict(token, memory)
    memory.positions[:] = 0
    found, _ = session.predict(token, memory)
    np.testing.assert_array_equal(found, session.predict(token, session.start(1))[0])


def test_a_step_between_check_and_lock_is_seen(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = OrtSession.open(artefacts["ring"], threads=1)
    expected, memory = session.start(1), session.start(1)
    for each in (expected, memory):
        for token in (1, 2, 3):
            session.predict(np.array([[token]]), each)
    session.predict(np.array([[4, 5]]), expected)
    in_use = Memory.in_use

    def after_another_thread(self: Memory) -> object:
        monkeypatch.setattr(Memory, "in_use", in_use)
        other = threading.Thread(target=session.predict, args=(np.array([[4, 5]]), memory))
        other.start()
        other.join()
        return in_use(self)

    monkeypatch.setattr(Memory, "in_use", after_another_thread)
    found, _ = session.predict(np.array([[6]]), memory)
    np.testing.assert_array_equal(found, session.predict(np.array([[6]]), expected)[0])
    np.testing.assert_array_equal(memory.positions, expected.positions)
