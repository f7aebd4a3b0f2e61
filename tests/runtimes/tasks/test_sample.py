"""Sampling against the naive rule, and against its definition by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.contract.sampling import Sampler
from runtimes.tasks.sample import LOGITS_PER_DRAW, RANDOM_BATCH, Draw, numbers, penalties_of
from tests.sampling import make_cases, read_cases

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 1.5, -3.0], np.float32)


def drawn(sampler: Sampler, logits: np.ndarray = LOGITS, count: int = 4000) -> np.ndarray:
    """How often each token comes, as shares, for evenly spread numbers."""
    rows = np.repeat(logits[None], count, axis=0)
    tokens = Draw([sampler] * count, len(logits))(rows, (np.arange(count) + 0.5) / count)
    return np.bincount(tokens, minlength=len(logits)) / count


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_a_row_draws_with_numbers_that_are_made_one_by_one() -> None:
    count = 2 * RANDOM_BATCH + 1
    chance = np.random.default_rng([3, 1])
    assert list(itertools.islice(numbers(3, 1), count)) == [chance.random() for _ in range(count)]


def test_every_case_draws_its_token() -> None:
    for case in read_cases():
        sampler, size = Sampler(**case["settings"]), len(case["logits"])
        penalties = penalties_of(sampler, size, case["prompt"])
        for token in case["generated"] if penalties else ():
            penalties.add(token)
        logits = np.array([case["logits"]], np.float32)
        assert Draw([sampler], size, [penalties])(logits, [case["uniform"]]) == case["token"], case


def test_the_cases_are_those_of_the_naive_rule() -> None:
    assert read_cases() == make_cases()


@pytest.mark.parametrize("size", [1, 2, 41, 300, 5000])
def test_a_row_draws_the_same_alone_and_in_a_batch(size: int) -> None:
    chance = np.random.default_rng(size)
    for _ in range(20 if size < 5000 else 3):
        rows = int(chance.integers(2, 24))
        same = chance.random() < 0.5
        samplers = [any_sampler(chance)] * rows if same else [any_sampler(chance) for _ in range(rows)]
        logits = (chance.normal(size=(rows, size)) * chance.choice([0.01, 3, 40])).astype(np.float32)
        if chance.random() < 0.3:
            logits = np.round(logits)  # many equals
        uniform = chance.random(rows)
        biases = [{int(chance.integers(size)): 2.0} if chance.random() < 0.2 else {} for _ in range(rows)]

        def penalties(row: int, samplers: Any = samplers, biases: Any = biases, size: int = size) -> Any:
            return penalties_of(samplers[row], size, [row % size], biases[row])

        kept = logits.copy()
        together = Draw(samplers, size, [penalties(row) for row in range(rows)])(logits, uniform)
        alone = [
            Draw([samplers[row]], size, [penalties(row)])(logits[row : row + 1], uniform[row : row + 1])[0]
            for row in range(rows)
        ]
        assert together.tolist() == alone
        assert np.array_equal(logits, kept)
    assert LOGITS_PER_DRAW < 24 * 5000, "the largest batches are drawn in parts"


def any_sampler(chance: np.random.Generator) -> Sampler:
    return Sampler(
        temperature=float(chance.choice([0, 1, 1, 0.7, 1e-300, 30])),
        top_k=[None, None, 1, 5, 40, 2000][chance.integers(6)],
        top_p=float(chance.choice([1, 1, 0.9, 0.5])),
        min_p=float(chance.choice([0, 0, 0.1])),
        repetition_penalty=float(chance.choice([1, 1, 1.2])),
    )


def test_greedy_draws_the_first_of_the_largest() -> None:
    assert drawn(Sampler(temperature=0, top_k=3, top_p=0.5))[1] == 1
    mixed = Draw([Sampler(temperature=0), Sampler()], len(LOGITS))
    assert mixed(np.stack([LOGITS, LOGITS]), [0.999, 0.999]).tolist() == [1, 5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_as_often_as_the_softmax_states(temperature: float) -> None:
    assert np.abs(drawn(Sampler(temperature=temperature)) - softmax(LOGITS / temperature)).max() < 0.001


@pytest.mark.parametrize(("k", "kept"), [(1, {1, 3}), (2, {1, 3}), (3, {1, 3, 4}), (5, {0, 1, 2, 3, 4})])
def test_top_k_keeps_ties_and_proportions(k: int, kept: set[int]) -> None:
    expected = np.where([token in kept for token in range(6)], softmax(LOGITS), 0)
    assert np.abs(drawn(Sampler(top_k=k)) - expected / expected.sum()).max() < 0.001


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 0.8, 0.95, 0.999])
def test_top_p_keeps_the_smallest_set_that_holds_the_share(p: float) -> None:
    chance = np.random.default_rng(1)
    for _ in range(20):
        logits = chance.normal(size=7).astype(np.float32)
        shares = softmax(logits.astype(np.float64))
        kept = drawn(Sampler(top_p=p, temperature=1), logits) > 0
        sets = [set(each) for n in range(1, 8) for each in itertools.combinations(range(7), n)]
        enough = [each for each in sets if shares[list(each)].sum() >= p - 1e-12]
        smallest = min(enough, key=lambda each: (len(each), -shares[list(each)].sum()))
        assert {token for token in range(7) if kept[token]} <= smallest
        assert kept[[each for each in smallest if shares[each] > 0.002]].all()


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    assert (drawn(Sampler(min_p=0.5)) > 0).tolist() == [False, True, False, True, True, False]
    assert (drawn(Sampler(min_p=1.0)) > 0).tolist() == [False, True, False, True, False, False]


def test_penalties_count_prompt_and_generated_tokens_as_defined() -> None:
    sampler = Sampler(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    penalties = penalties_of(sampler, 4, [0, 1], {2: 1.0})
    assert penalties is not None
    penalties.add(3)
    penalties.add(3)
    logits = np.array([4.0, -4.0, 4.0, 4.0])
    penalties.apply(logits)
    assert logits.tolist() == [2, -8, 5, 2 - 0.5 - 2 * 0.25]


def test_drawn_tokens_are_counted_by_the_draw() -> None:
    sampler = Sampler(temperature=0, presence_penalty=2)
    draw = Draw([sampler], 3, [penalties_of(sampler, 3, [])])
    logits = np.array([[3.0, 2.5, 2.0]], np.float32)
    assert [int(draw(logits, ())[0]) for _ in range(4)] == [0, 1, 2, 0]


def test_masked_symbols_are_never_drawn() -> None:
    logits = np.array([-np.inf, 3e38, 3e38, -3e38], np.float32)
    assert drawn(Sampler(), logits, 200).tolist() == [0, 0.5, 0.5, 0]
    assert drawn(Sampler(temperature=5e-324, top_k=1), logits, 200).tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize("broken", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_refused(broken: list[float], temperature: float) -> None:
    rows = np.array([[1, 2], broken, [2, 1]], np.float32)
    draw = Draw([Sampler(temperature=temperature)] * 3, 2)
    assert draw.tokens(rows, [0.9, 0.9, 0.1]) == [1, -1, 0]
    with pytest.raises(UserError, match="not finite"):
        draw(rows, [0.9, 0.9, 0.1])
