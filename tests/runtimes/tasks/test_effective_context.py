"""RECL from loss matrices: an example worked out by hand, and what must hold for any losses."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.tasks.effective_context import Recl, perplexities, perplexity_gains, recl, relative_gains

# Two models, three lengths, four positions. Losses in nats:
#
#            A                  B             b = min(A, B)
# c = 10     4  4  1  1         6  6  3  3    4  4  1  1
# c = 20     3  4  1  1         4  5  1  1    3  4  1  1
# c = 30     3  4  1  0         2  4  1  1
#
# All positions (r = 1):
#   10 → 20  f(10, 10) = 10/4   A: min(b, A20) = 3 4 1 1, 9/4, gain 1 - e^(-1/4) = 0.2212
# B: min(b, B20) = 4 4 1 1, 10/4, gain 0: it gains 7/4 on itself, nothing on the group
#   20 → 30  f(20, 20) =  9/4   A: min(b, A30) = 3 4 1 0, 8/4, gain 0.2212
#                               B: min(b, B30) = 2 4 1 1, 8/4, gain 0.2212
# The harder half (r = 0.5), positions 1 and 2 at both steps:
#   10 → 20  f(10, 10) =  8/2   A: 3 4, 7/2, gain 1 - e^(-1/2) = 0.3935      B: 4 4, 8/2, gain 0
#   20 → 30  f(20, 20) =  7/2   A: 3 4, 7/2, gain 0                          B: 2 4, 6/2, gain 0.3935
LENGTHS = (10, 20, 30)
LOSSES = np.array(
    [
        [[4, 4, 1, 1], [3, 4, 1, 1], [3, 4, 1, 0]],
        [[6, 6, 3, 3], [4, 5, 1, 1], [2, 4, 1, 1]],
    ],
    np.float32,
)
QUARTER, HALF = 1 - math.exp(-0.25), 1 - math.exp(-0.5)


def test_gains_of_the_example() -> None:
    assert np.allclose(relative_gains(LOSSES, r=1.0), [[QUARTER, QUARTER], [0, QUARTER]])
    assert np.allclose(relative_gains(LOSSES, r=0.5), [[HALF, 0], [0, HALF]])
    e = math.exp
    assert np.allclose(perplexity_gains(LOSSES, r=0.5), [[e(4) - e(3.5), 0], [0, e(3.5) - e(3)]])
    assert np.allclose(perplexities(LOSSES), np.exp([[2.5, 2.25, 2.0], [4.5, 2.75, 2.0]]))


def test_recl_of_the_example() -> None:
    """A gains at both steps; B gains nothing at the first, and what it gains later is not looked at."""
    assert recl(LOSSES, LENGTHS, r=1.0) == [Recl(30, at_least=True), Recl(10, at_least=False)]
    assert recl(LOSSES, LENGTHS, r=0.5) == [Recl(20, at_least=False), Recl(10, at_least=False)]


def test_the_share_is_rounded_and_never_empty() -> None:
    """r = 0.1 of four positions is one: position 2 in the second step, where neither model gains."""
    assert np.allclose(relative_gains(LOSSES, r=0.1), [[1 - math.exp(-1), 0], [0, 0]])
    assert np.allclose(relative_gains(LOSSES, r=0.6), relative_gains(LOSSES, r=0.5))


def test_a_lower_bound_is_shown_as_one() -> None:
    assert [str(Recl(30, at_least=True)), str(Recl(20, at_least=False))] == ["≥ 30", "20"]


losses = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).gamma(2.0, 1.5, (3, 5, 20)).astype(np.float32)
)
shares = st.sampled_from([0.05, 0.1, 0.5, 1.0])


@settings(max_examples=40)
@given(losses_ICN=losses, r=shares)
def test_recl_is_a_length_and_follows_its_model(losses_ICN: np.ndarray, r: float) -> None:
    lengths = (2, 3, 5, 8, 13)
    found = recl(losses_ICN, lengths, r=r)
    assert all(one.length in lengths and (not one.at_least or one.length == 13) for one in found)
    assert recl(losses_ICN[::-1], lengths, r=r) == found[::-1]
    assert recl(losses_ICN[[0, 1, 2, 1]], lengths, r=r) == [
        *found,
        found[1],
    ]  # a twin changes nothing and gets the same
    assert (relative_gains(losses_ICN, r=r) >= 0).all()


@settings(max_examples=40)
@given(losses_ICN=losses, r=shares, best=st.integers(0, 4), drop=st.floats(0.02, 1.0))
def test_recl_of_the_strongest_model_is_where_losses_stop_falling(
    losses_ICN: np.ndarray, r: float, best: int, drop: float
) -> None:
    falling = losses_ICN[0, 0].min() - 1 - drop * np.minimum(np.arange(5), best)
    losses_ICN = losses_ICN + losses_ICN[0, 0].max()  # the others are worse than it, always
    losses_ICN[0] = falling[:, None]
    first, *_ = recl(losses_ICN, (100, 200, 300, 400, 500), r=r)
    assert first == Recl(100 + 100 * best, at_least=best == 4)


def test_a_hopeless_model_overflows_nothing() -> None:
    assert np.isfinite(perplexities(np.full((1, 2, 3), 1e4, np.float32))).all()
    assert np.isfinite(perplexity_gains(np.full((1, 2, 3), 1e4, np.float32), r=1.0)).all()
