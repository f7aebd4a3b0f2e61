"""A batch draws bitwise what `Sampler` draws row by row, and names the likeliest tokens as sorting does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes.base.logits import log_sum_exp
from runtimes.tasks.sample import Sampler
from xl_export.serve.core.running import Account, Running
from xl_export.serve.core.sampling import Draws, _chosen, _within_shares, likeliest, log_probs_of
from xl_export.serve.core.task import Drawing, Task

SESSION: Any = SimpleNamespace(
    vocab=SimpleNamespace(decoder=lambda: str, kind="char"), rule=SimpleNamespace(segment=8)
)


def run(sampler: Sampler, seed: int, bias: dict[int, float]) -> Running:
    drawing = Drawing(max_tokens=1, sampler=sampler, seed=seed, index=3, bias=bias)
    running = Running(Task(tokens=np.zeros(1, np.int64), drawing=drawing), SESSION)
    running.account = Account("")
    return running


def any_sampler(chance: np.random.Generator) -> Sampler:
    return Sampler(
        temperature=float(chance.choice([0, 1, 1, 0.7, 1e-6, 30, 1e6])),
        top_k=[None, 1, 2, 5, 40, 40, 2000, 10**9][chance.integers(8)],
        top_p=float(chance.choice([1, 1, 0.9, 0.5, 0.999, 1e-9])),
    )


def any_logits(chance: np.random.Generator, rows: int, size: int) -> np.ndarray:
    logits = (chance.normal(size=(rows, size)) * chance.choice([0.01, 3, 40])).astype(np.float32)
    kind = chance.integers(5)
    if kind == 1:  # many equals
        logits = np.round(logits)
    if kind == 2:
        logits[:] = 1.5
    if kind == 3:  # most tokens are impossible, in some rows all but a few
        logits[chance.random(logits.shape) < chance.choice([0.5, 0.99])] = -np.inf
        logits[:, 0] = 0
    if kind == 4:  # differences that vanish when the largest is subtracted
        logits[:] = 1e-20 * chance.random(logits.shape)
        logits[:, 0] = 2
    return logits


def check(chance: np.random.Generator, size: int, steps: int = 3) -> None:
    rows = int(chance.integers(1, 12))
    same = any_sampler(chance) if chance.random() < 0.3 else None
    samplers = [same or any_sampler(chance) for _ in range(rows)]
    biases = [{int(chance.integers(size)): 7.5} if chance.random() < 0.3 else {} for _ in range(rows)]
    runs = [run(sampler, row, biases[row]) for row, sampler in enumerate(samplers)]
    naive = [np.random.default_rng([row, 3]) for row in range(rows)]
    draws = Draws(runs, None)
    for _ in range(steps):
        logits = any_logits(chance, rows, size)
        kept = logits.copy()
        expected = []
        for row, sampler in enumerate(samplers):
            own = logits[row].copy()
            for token, bias in biases[row].items():
                own[token] += np.float32(bias)
            expected.append(sampler(own, naive[row]))
        assert draws.draw(logits) == expected, samplers
        assert np.array_equal(logits, kept)


@pytest.mark.parametrize("size", [1, 2, 41, 300, 3000])
def test_a_mixed_batch_draws_what_each_sampler_draws_alone(size: int) -> None:
    chance = np.random.default_rng(size)
    for _ in range(60 if size < 3000 else 15):
        check(chance, size)


def test_so_it_does_from_a_large_vocabulary() -> None:
    check(np.random.default_rng(1), 270_000, steps=1)


@pytest.mark.slow
def test_many_mixed_batches_draw_what_each_sampler_draws_alone() -> None:
    chance = np.random.default_rng(7)
    for _ in range(300):
        check(chance, int(chance.choice([2, 7, 65, 513, 2100, 33_000])))


def test_ordinary_rows_are_not_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be right too, and slow."""
    monkeypatch.setattr("xl_export.serve.core.sampling._alone", lambda *given: pytest.fail("one by one"))
    chance = np.random.default_rng(4)
    for size in (41, 300, 3000):
        for sampler in (
            Sampler(),
            Sampler(top_k=20),
            Sampler(top_k=20, top_p=0.9, temperature=0.7),
            Sampler(top_p=0.9),
        ):
            runs = [run(sampler, row, {}) for row in range(6)]
            naive = [np.random.default_rng([row, 3]) for row in range(6)]
            for _ in range(20):
                logits = (3 * chance.normal(size=(6, size))).astype(np.float32)
                expected = [sampler(row, rng) for row, rng in zip(logits, naive, strict=True)]
                assert Draws(runs, None).draw(logits) == expected


def test_what_rounding_could_decide_is_not_sure() -> None:
    weights = np.array([[1.0, 1, 1, 1], [4.0, 1, 1, 1], [1.0, 1, 1, 1]])
    sure = _within_shares(weights, np.array([[0.5], [0.5], [1.0]]))
    assert sure.tolist() == [False, True, True]
    assert weights[1:].tolist() == [[4, 0, 0, 0], [1, 1, 1, 1]]
    places, sure = _chosen(np.array([[1.0, 1, 2], [1, 1, 2], [0, 1, 1]]), np.array([0.25, 0.3, 0.0]))
    assert (places.tolist(), sure.tolist()) == ([1, 1, 1], [False, True, False])


def test_a_row_without_a_finite_maximum_draws_nothing_and_the_others_draw_as_ever() -> None:
    chance = np.random.default_rng(0)
    logits = any_logits(chance, 4, 50)
    runs = [run(Sampler(top_k=k), row, {3: 2.0}) for row, k in enumerate((None, 5, 5, 9))]
    others = [run(Sampler(top_k=k), row, {3: 2.0}) for row, k in enumerate((None, 5, 5, 9))]
    expected = Draws(others, None).draw(logits)
    for row, bad in ((1, np.nan), (3, np.inf)):
        logits[row, 7] = bad
        expected[row] = -1
    logits[0, 9] = -np.inf if expected[0] != 9 else logits[0, 9]
    found = Draws(runs, None).draw(logits)
    assert found[1:] == expected[1:]
    assert found[0] >= 0


def test_the_likeliest_tokens_are_those_that_sorting_finds() -> None:
    chance = np.random.default_rng(3)
    for size, count in ((300, 5), (300, 1), (300, 200), (4, 20), (20_000, 20)):
        for _ in range(8):
            logits = any_logits(chance, 6, size)
            found = likeliest(logits, count)
            order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
            log_probs = logits - log_sum_exp(logits)[:, None]
            assert np.array_equal(found.ids, order)
            assert np.array_equal(found.log_probs, np.take_along_axis(log_probs, order, axis=1))
            tokens = order[:, -1]
            assert np.array_equal(log_probs_of(logits, tokens), log_probs[range(6), tokens])
