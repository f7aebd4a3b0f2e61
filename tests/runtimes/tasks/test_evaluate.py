"""Scoring: every token but the first exactly once, whatever the lanes and segments."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes import Memory, evaluate, open_session
from runtimes.base.errors import DivergedError
from runtimes.base.logits import IMPOSSIBLE, log_probability, log_sum_exp
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import TensorSpec
from runtimes.contract.vocabulary import ByteVocab
from tests.from_logits import FromLogits


class Follower(FromLogits):
    """A session over bytes that gives logit 5 to the successor of what it was just fed, and 0 to the rest."""

    identity, rule, vocab = "follower", MemoryRule(mem_len=4, segment=6), ByteVocab()
    state: tuple[TensorSpec, ...] = ()

    def __init__(self) -> None:
        self.fed: list[np.ndarray] = []
        self.starts: list[list[int]] = []

    def start(self, batch: int) -> Memory:
        return Memory(np.zeros(batch, np.int64), {}, self.identity)

    def step(self, tokens: np.ndarray, memory: Memory, *, lengths: None = None) -> tuple[np.ndarray, Memory]:
        self.fed.append(tokens.copy())
        self.starts.append(memory.positions.tolist())
        logits = np.zeros((*tokens.shape, 256), np.float32)
        np.put_along_axis(logits, ((tokens + 1) % 256)[..., None], 5.0, axis=-1)
        memory.positions += tokens.shape[1]
        return logits, memory


RIGHT = math.log(math.exp(5) + 255) - 5  # nats of the successor
WRONG = math.log(math.exp(5) + 255)


@settings(max_examples=60)
@given(data=st.binary(min_size=2, max_size=60), lanes=st.integers(1, 9), segment=st.integers(1, 6))
def test_every_token_but_the_first_is_scored_once(data: bytes, lanes: int, segment: int) -> None:
    tokens = np.frombuffer(data, np.uint8).astype(np.int64)
    lanes = min(lanes, len(tokens) - 1)
    session = Follower()
    score = evaluate(session, tokens, lanes=lanes, segment=segment)
    expected = [
        RIGHT if after == (before + 1) % 256 else WRONG for before, after in itertools.pairwise(tokens)
    ]
    assert np.allclose(score.token_nats, expected, atol=1e-5)
    assert score.tokens == len(tokens) - 1
    assert score.nats == pytest.approx(sum(expected), abs=1e-3)
    assert max(fed.shape[1] for fed in session.fed) <= segment
    assert {fed.shape[0] for fed in session.fed} == {lanes}


def test_figures_follow_from_the_nats() -> None:
    score = evaluate(Follower(), np.arange(20))
    assert score.nats_per_token == pytest.approx(RIGHT, abs=1e-5)
    assert score.bits_per_token == pytest.approx(RIGHT / math.log(2), abs=1e-5)
    assert score.perplexity == pytest.approx(math.exp(RIGHT), abs=1e-4)
    assert score.tokens_per_second == pytest.approx(19 / score.seconds)
    facts = score.to_json()
    assert (facts["mem_len"], facts["mask"], facts["segment"], facts["lanes"]) == (4, "same-length", 6, 1)


def test_the_last_segment_may_be_short() -> None:
    session = Follower()
    evaluate(session, np.arange(15), segment=6)
    assert [fed.shape[1] for fed in session.fed] == [6, 6, 2]
    assert np.concatenate(session.fed, axis=1).tolist() == [list(range(14))]


def test_memory_cut_to_zero_starts_every_segment_at_position_zero() -> None:
    carried, cut = Follower(), Follower()
    evaluate(carried, np.arange(20), segment=6)
    evaluate(cut, np.arange(20), segment=6, carry_memory=False)
    assert [start[0] for start in carried.starts] == [0, 6, 12, 18]
    assert [start[0] for start in cut.starts] == [0, 0, 0, 0]


def test_lanes_score_as_each_part_alone(artefacts: dict[str, Path], tokens: np.ndarray) -> None:
    session = open_session(artefacts["ring"])
    whole = evaluate(session, tokens[:101], lanes=3)
    parts = [evaluate(session, tokens[a : b + 1]).token_nats for a, b in ((0, 33), (33, 66), (66, 100))]
    assert np.allclose(whole.token_nats, np.concatenate(parts), atol=1e-5)


class Broken(Follower):
    """Gives `value` for the logit of token 9, or for all of them, after token `after`."""

    def __init__(self, value: float, *, everywhere: bool = False, after: int = 8) -> None:
        super().__init__()
        self.value, self.after, self.chosen = value, after, slice(None) if everywhere else 9

    def step(self, tokens: np.ndarray, memory: Memory, *, lengths: None = None) -> tuple[np.ndarray, Memory]:
        logits, memory = super().step(tokens, memory)
        for row, column in np.argwhere(tokens == self.after):
            logits[row, column, self.chosen] = self.value
        return logits, memory


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "session",
    [Broken(math.nan), Broken(math.nan, everywhere=True), Broken(math.inf)],
    ids=["one", "all", "inf"],
)
def test_a_loss_that_is_nan_is_refused_at_once(session: Broken, lanes: int) -> None:
    session.fed.clear()
    with pytest.raises(
        DivergedError,
        match=r"^the model follower gives token 9 of the text a log-prob.* not a number; [^.]*\.$",
    ):
        evaluate(session, np.arange(60), lanes=lanes, segment=6)
    assert len(session.fed) == 2  # of ten


def test_an_impossible_token_is_counted() -> None:
    score = evaluate(Broken(-math.inf), np.array([*range(9), 0, *range(1, 10)]))
    assert score.token_nats[-1] == -IMPOSSIBLE
    assert (score.impossible, score.to_json()["impossible"]) == (1, 1)
    assert score.nats == pytest.approx(score.token_nats.sum())
    assert evaluate(Broken(-math.inf), np.arange(9)).impossible == 0


def test_what_is_not_wanted_may_be_anything() -> None:
    """Padding behind a shorter lane is fed and not counted."""
    session = Broken(math.nan, everywhere=True, after=0)
    assert math.isfinite(evaluate(session, np.arange(1, 7), lanes=2).nats)
    assert session.fed[0].tolist() == [[1, 2, 0], [3, 4, 5]]


def test_progress_counts_every_token_once() -> None:
    done: list[int] = []
    evaluate(Follower(), np.arange(24), lanes=3, segment=3, progress=done.append)
    assert done == [9, 18, 23]


def test_log_probabilities_are_stable_for_large_logits() -> None:
    logits = np.array([[[1000.0, 0.0, -1000.0]]], np.float32)
    assert log_sum_exp(logits)[0, 0] == 1000.0
    assert log_probability(logits, np.array([[1]]))[0, 0] == -1000.0


@pytest.mark.filterwarnings("ignore:invalid value")
def test_one_token_has_the_bits_that_it_has_among_others() -> None:
    chance = np.random.default_rng(0)
    for size in (1, 2, 140, 2560):
        logits = (chance.normal(size=(3, 20, size)) * 9).astype(np.float32)
        targets = chance.integers(-1, size, (3, 20))
        for row, value in enumerate((np.nan, np.inf, -np.inf)):
            logits[row, :2, 0] = value
        whole = log_probability(logits, targets)
        for row, at in np.ndindex(targets.shape):
            one = log_probability(logits[row : row + 1, at : at + 1], targets[row : row + 1, at : at + 1])
            np.testing.assert_array_equal(one, whole[row : row + 1, at : at + 1])
