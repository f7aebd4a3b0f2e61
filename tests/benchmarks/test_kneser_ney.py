"""The n-gram baseline against numbers that were computed by hand, and against the rules of probability."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases.learning.kneser_ney import KneserNey


def test_bigrams_of_a_tiny_text_equal_those_computed_by_hand():
    # The text a b a c a b, of 4 possible tokens, is too short for the paper's discounts, so each is a half.
    # bigrams: ab 2, ba 1, ac 1, ca 1. What stands before a token: a has {b, c}, b has {a}, c has {a}.
    model = KneserNey(np.array([0, 1, 0, 2, 0, 1]), vocab_size=4, order=2)
    # unigrams: (2 - ½)/4, (1 - ½)/4, (1 - ½)/4, and three halves of 4 for the uniform ¼ of each token
    below = np.array([1.5, 0.5, 0.5, 0.0]) / 4 + 1.5 / 4 / 4
    # after a: b (2 - ½)/3, c (1 - ½)/3, and 1/3 for the unigrams; after d nothing is known
    assert model.probabilities(np.array([0, 1]))[1] == pytest.approx(1.5 / 3 + below[1] / 3)
    assert model.probabilities(np.array([0, 2]))[1] == pytest.approx(0.5 / 3 + below[2] / 3)
    assert model.probabilities(np.array([0, 3]))[1] == pytest.approx(below[3] / 3)
    assert model.probabilities(np.array([3, 0])) == pytest.approx([below[3], below[0]])


def test_probabilities_after_any_context_add_up_to_one():
    rng = np.random.default_rng(0)
    text = np.cumsum(rng.zipf(1.8, 3000)) % 20  # every count from 1 to 4 appears among its trigrams
    model = KneserNey(text, vocab_size=20, order=3)
    assert set(model.orders[2].discounts[1:]).isdisjoint({0.5})
    for context in [*rng.integers(0, 20, (20, 2)), *text[:40].reshape(20, 2)]:
        after = [model.probabilities(np.append(context, token))[-1] for token in range(20)]
        assert sum(after) == pytest.approx(1)
    assert -np.log2(model.probabilities(text)).mean() < 2.5 < np.log2(20)
