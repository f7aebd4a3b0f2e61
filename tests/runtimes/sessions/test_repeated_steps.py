"""Steps of one kind reuse arrays that stay bound; `tests/test_sessions.py` has their matrix."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.memory import Memory
from runtimes.sessions.onnx_runtime import OrtSession


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
