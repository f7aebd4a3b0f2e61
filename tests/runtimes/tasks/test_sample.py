"""Sampling against definitions by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.tasks.sample import Sampler, keep_top_k, keep_top_p

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 1.5, -3.0], np.float32)


def drawn(sampler: Sampler, logits: np.ndarray = LOGITS, count: int = 4000) -> np.ndarray:
    """How often each token came, as shares."""
    rng = np.random.default_rng(0)
    return np.bincount([sampler(logits, rng) for _ in range(count)], minlength=len(logits)) / count


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_greedy_takes_the_first_of_the_largest_and_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    assert {Sampler(temperature=0, top_k=3, top_p=0.5)(LOGITS, rng) for _ in range(20)} == {1}
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    assert np.abs(drawn(Sampler(temperature=temperature)) - softmax(LOGITS / temperature)).max() < 0.03


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 99])
def test_top_k_draws_from_the_k_largest_in_their_proportions(k: int) -> None:
    order = sorted(range(len(LOGITS)), key=lambda token: (-LOGITS[token], token))
    expected = np.zeros(len(LOGITS))
    expected[order[:k]] = softmax(LOGITS)[order[:k]]
    shares = drawn(Sampler(top_k=k))
    assert np.abs(shares - expected / expected.sum()).max() < 0.03
    assert not shares[expected == 0].any()


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_that_holds_the_share(p: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        weights = rng.exponential(size=7)
        shares = weights / weights.sum()
        kept = keep_top_p(weights, p) > 0
        assert shares[kept].sum() >= p - 1e-12
        sizes = [
            len(chosen)
            for n in range(1, 8)
            for chosen in itertools.combinations(shares, n)
            if sum(chosen) >= p - 1e-12
        ]
        assert kept.sum() == min(sizes)
        assert shares[kept].min() >= shares[~kept].max(initial=0)
        assert np.array_equal(keep_top_p(weights, p)[kept], weights[kept])


def test_top_p_applies_to_what_top_k_left() -> None:
    shares = drawn(Sampler(top_k=3, top_p=0.5))  # of 2.0, 2.0 and 1.5 the two 2.0 hold 77 %; one of them 38 %
    assert shares[[1, 3]].min() > 0.45
    assert shares[[1, 3]].sum() == 1


def test_ties_go_to_the_smaller_token() -> None:
    assert np.flatnonzero(np.isfinite(keep_top_k(np.zeros(5), 2))).tolist() == [0, 1]
    assert np.flatnonzero(keep_top_p(np.ones(4), 0.5)).tolist() == [0, 1]


def test_the_caller_s_logits_are_not_changed() -> None:
    logits = LOGITS.copy()
    Sampler(temperature=0.7, top_k=2, top_p=0.5)(logits, np.random.default_rng(0))
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [1e-30, 1e-310, 5e-324])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    assert Sampler(temperature=temperature)(LOGITS[2:], np.random.default_rng(0)) == 1


def test_masked_symbols_are_never_drawn_and_large_logits_do_not_overflow() -> None:
    logits = np.array([-np.inf, 3e38, 3e38, -3e38], np.float32)
    shares = drawn(Sampler(), logits, 200)
    assert shares[1] > 0.3
    assert shares[2] > 0.3
    assert shares[1] + shares[2] == 1


@pytest.mark.parametrize("broken", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_refused(broken: list[float], temperature: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        Sampler(temperature=temperature)(np.array(broken), np.random.default_rng(0))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": -0.5},
        {"top_p": 1.01},
        {"top_p": float("nan")},
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(settings))} is .*; expected"):
        Sampler(**settings)
