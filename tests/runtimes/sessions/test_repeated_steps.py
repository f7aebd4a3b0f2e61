"""Steps of one shape reuse arrays that stay bound; a session that binds every step gives the same answers."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract.memory import Memory
from runtimes.sessions import graph
from runtimes.sessions.onnx_runtime import OrtSession
from tests.nightly import every


def answers(session: OrtSession, seed: int) -> list[np.ndarray]:
    """Answers to random steps, between which the caller does to the memory what a caller may do."""
    rng = np.random.default_rng(seed)
    memory = session.start(3)
    found = []
    for _ in range(80):
        length = int(rng.choice([1, 1, 1, 2, 3]))
        tokens = rng.integers(0, session.vocab.size, (3, length))
        match rng.integers(0, 12):
            case 0 | 1 | 2 | 3:
                found.append(session.predict(tokens, memory)[0])
            case 4:
                found.append(session.step(tokens, memory)[0])
            case 5:
                targets = rng.integers(-1, session.vocab.size, tokens.shape)
                found.append(session.score(tokens, targets, memory)[0])
            case 6:
                memory.positions[rng.integers(3)] = 0
            case 7:
                memory = memory.select(rng.integers(0, 3, 3))
            case 8:
                name = next(iter(memory.tensors))
                memory.tensors[name] = np.zeros_like(memory.tensors[name])
            case 9:
                memory.positions = memory.positions + 1
            case 10:
                tokens[rng.integers(3), -1] = session.vocab.size
                with pytest.raises(StreamError, match="outside the vocabulary"):
                    session.predict(tokens, memory)
            case 11:
                for _ in range(3):
                    found.append(session.predict(tokens[:2, :1], memory.part(0, 2))[0])
    return found


@pytest.mark.parametrize(("seed", "form"), every(4, itertools.product(range(4), ("ring", "shift", "hidden"))))
def test_reused_arrays_change_no_answer(
    form: str, seed: int, artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = OrtSession.open(artefacts[form], threads=1)
    reused = answers(session, seed)
    monkeypatch.setattr(graph, "MOST_KEPT", -1)
    bound_anew = answers(session, seed)
    for mine, theirs in zip(reused, bound_anew, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_every_kind_of_step_follows_every_other(artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts["ring"], threads=1)
    token = np.array([[3]])
    kinds = (session.step, session.predict, partial(session.score, token))
    for before, after in itertools.product(kinds, repeat=2):
        memory = session.start(1)
        before(token, memory)
        anew = memory.copy()  # which has no arrays of a step
        np.testing.assert_array_equal(after(token, memory)[0], after(token, anew)[0])


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
