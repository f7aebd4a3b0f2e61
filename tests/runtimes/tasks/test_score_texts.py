"""Independent texts: what is predicted from what, and each text gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes import Memory, Session, TextToScore, open_session, score_texts
from runtimes.base.errors import DivergedError, TextError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import (
    WordVocab,
)
from runtimes.tasks.score_texts import STEP_TOKENS, BatchLimits, make_batches
from tests.architectures import ARCHITECTURES
from tests.nightly import every
from tests.runtimes.tasks.independent_texts import SIZE, Counting, same_as_alone, some_texts

FEW = ("adaptive-softmax", "absolute-from-segment-end")  # artefacts that differ most

ids = st.lists(st.integers(0, SIZE - 1), max_size=21)  # up to three segments of 8
contexts = st.lists(st.lists(st.integers(0, SIZE - 1), max_size=40), min_size=1, max_size=4)


@st.composite
def inputs(draw: st.DrawFn) -> list[TextToScore]:
    """Texts of all lengths, some of which share a context."""
    shared = draw(contexts)
    return [
        TextToScore(text=text, context=draw(st.sampled_from([[], *shared])), id=f"t{number}")
        for number, text in enumerate(draw(st.lists(ids, max_size=14)))
    ]


@pytest.mark.parametrize("kind", every(2, ["ring", "shift", "torch", "hidden"]))
@settings(max_examples=8)
@given(texts=inputs(), batch=st.sampled_from([None, 1, 3, 5]), window=st.sampled_from([1, 60, 1 << 16]))
def test_each_text_gets_what_it_gets_alone(
    kind: str, sessions: dict[str, Session], texts: list[TextToScore], batch: int | None, window: int
) -> None:
    same_as_alone(sessions[kind], texts, batch=batch, window=window)


def test_full_mask_texts_are_cut_as_they_are_alone(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from xl_export.artefact.export import export

    run = make_run(rule=MemoryRule(mem_len=5, segment=8, mask="full"))
    draw = np.random.default_rng(0)
    contexts = [draw.integers(0, SIZE, length).tolist() for length in range(11, 40, 7)]
    texts = [TextToScore(text=context[:20], context=context, id=len(context)) for context in contexts]
    same_as_alone(open_session(run), texts)
    same_as_alone(open_session(export(run, tmp_path / "ring")), texts)


@pytest.mark.parametrize("name", every(8, ARCHITECTURES))
def test_every_architecture(name: str, make_run: Callable[..., Path]) -> None:
    same_as_alone(open_session(make_run(**ARCHITECTURES[name])), some_texts(1)[:8])


@pytest.mark.parametrize(
    "name",
    [
        *FEW,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in FEW),
    ],
)
def test_every_architecture_as_an_artefact(name: str, make_run: Callable[..., Path], tmp_path: Path) -> None:
    from xl_export.artefact.export import export

    session = open_session(export(make_run(**ARCHITECTURES[name]), tmp_path / "ring"))
    same_as_alone(session, some_texts(2))
    # Padding leaves no memory unsure: a session would clear its rows before the next texts, which is slow.
    right, unsure = session.score, []

    def score(inputs: np.ndarray, targets: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        log_probs, memory = right(inputs, targets, memory)
        unsure.append(memory.unsure)
        return log_probs, memory

    session.score = score  # type: ignore[method-assign, assignment]
    list(score_texts(session, some_texts(2)))
    assert unsure
    assert not any(unsure)


RIGHT = 5 - np.log(np.exp(5) + 8)
WRONG = -np.log(np.exp(5) + 8)


@pytest.mark.parametrize(
    ("text", "context", "options", "predicted"),
    [
        ([], [], "", []),
        ([], [], "bos", []),
        ([], [], "eos", []),  # the end would be the first token, and nothing comes before it
        ([], [], "bos eos", [(8, 8)]),
        ([], [3], "eos", [(3, 8)]),
        ([2], [], "", []),
        ([2], [], "bos", [(8, 2)]),
        ([2], [], "eos", [(2, 8)]),
        ([2], [3], "", [(3, 2)]),
        ([2], [3], "bos", [(3, 2)]),  # the beginning stands before the context
        ([2], [8], "bos", [(8, 2)]),
        ([2, 2, 4], [], "", [(2, 2), (2, 4)]),
        ([2, 2, 4], [], "bos eos", [(8, 2), (2, 2), (2, 4), (4, 8)]),
        ([2, 2, 4], [1, 1, 3], "eos", [(3, 2), (2, 2), (2, 4), (4, 8)]),
        ([8, 2, 8], [], "bos eos", [(8, 2), (2, 8)]),  # neither is put there twice
        ([8, 2], [3], "bos", [(3, 8), (8, 2)]),
        ([8], [], "bos eos", [(8, 8)]),  # its end, and not its beginning
    ],
)
def test_what_each_token_is_predicted_from(
    text: list[int], context: list[int], options: str, predicted: list[tuple[int, int]]
) -> None:
    session, flags = Counting(), dict.fromkeys(options.split(), True)
    (score,) = score_texts(session, [TextToScore(text=text, context=context)], tokens=True, **flags)  # type: ignore[arg-type]
    assert score.token_ids.tolist() == [after for _, after in predicted]
    expected = [RIGHT if before == after else WRONG for before, after in predicted]
    assert np.allclose(score.token_log_probs, expected, atol=1e-5)
    assert score.tokens == len(expected)
    assert score.log_prob == pytest.approx(sum(expected), abs=1e-5)
    assert score.unknown == 0


def test_bos_precedes_the_context_and_is_fed_once() -> None:
    session = Counting()
    texts = [TextToScore(text=[text], context=[3, 4]) for text in range(6)]
    assert [score.tokens for score in score_texts(session, texts, bos=True)] == [1] * 6
    before = [row for row in session.fed if (0, 8) in row]
    assert before == [[(0, 8), (1, 3)]]
    assert sum((2, 4) in row for row in session.fed) == 6


def test_a_context_is_fed_once_in_a_window() -> None:
    def fed(window: int) -> int:
        session = Counting()
        texts = [TextToScore(text=[1, 2], context=[3, 4 + number % 2, 5]) for number in range(8)]
        assert len(list(score_texts(session, texts, window=window))) == 8
        return sum((1, 4) in row for row in session.fed) + sum((1, 5) in row for row in session.fed)

    assert fed(1000) == 2
    assert fed(1) == 8


def test_only_unknown_tokens_of_the_text_are_counted() -> None:
    texts = [TextToScore(text=[6, 1, 6], context=context) for context in ([], [6, 6])]
    assert [score.unknown for score in score_texts(Counting(), texts)] == [2, 2]


def test_words_and_their_numbers() -> None:
    session = Counting()
    session.vocab = WordVocab(["<unk>", "<eos>", "naïve", "cat"])
    scores = list(score_texts(session, ["naïve cat", "dog", "", [2, 3]], bos=True, eos=True))
    assert [score.token_ids.tolist() for score in scores] == [[2, 3, 1], [0, 1], [1], [2, 3, 1]]
    assert [score.unknown for score in scores] == [0, 1, 0, 0]
    assert [(score.characters, score.num_bytes) for score in scores] == [
        (9, 10),
        (3, 3),
        (0, 0),
        (None, None),
    ]
    assert [score.id for score in scores] == [1, 2, 3, 4]
    assert all(score.token_log_probs is None for score in scores)


def test_texts_are_read_and_returned_in_windows() -> None:
    read: list[int] = []

    def texts() -> Any:
        for number in range(40):
            read.append(number)
            yield [number % 6] * (1 + number % 3)

    scores = score_texts(Counting(), texts(), window=12)
    assert read == []
    for number, score in enumerate(scores):
        assert score.number == number + 1
        assert number < len(read) <= number + 12


def test_memories_are_made_once_for_each_size() -> None:
    session = Counting()
    texts = np.random.default_rng(0).integers(1, 30, 400)
    list(score_texts(session, [[1] * length for length in texts], batch=6, window=300))
    rows = session.started
    assert len(rows) == len(set(rows))
    assert set(rows) <= {1, 2, 4, 6}


def test_what_comes_before_an_error_is_scored_first() -> None:
    def texts() -> Any:
        yield [1, 2]
        yield [3, 4]
        raise TextError("the third line is damaged.")

    scores = score_texts(Counting(), texts())
    assert [next(scores).number, next(scores).number] == [1, 2]
    with pytest.raises(TextError, match="the third line"):
        next(scores)


def test_scores_that_are_not_numbers_name_the_text() -> None:
    class Broken(Counting):
        def step(
            self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
        ) -> tuple[np.ndarray, Memory]:
            logits, memory = super().step(tokens, memory)
            logits[tokens == 5, 2] = np.nan
            return logits, memory

    scores = score_texts(Broken(), [[1, 2], [5, 1], [1, 5, 2, 3]])
    assert next(scores).tokens == 1
    with pytest.raises(DivergedError, match=r"of text 2 .*not a number"):
        next(scores)


def naive_cost(batches: list[list[int]], segment: int) -> int:
    return sum(len(rows) * max(rows) + STEP_TOKENS * -(-max(rows) // segment) for rows in batches)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=30),
    rows=st.integers(1, 9),
    tokens=st.integers(1, 100),
    padding=st.booleans(),
)
def test_batches_hold_every_text_once_within_the_limits(
    lengths: list[int], rows: int, tokens: int, padding: bool
) -> None:
    limits = BatchLimits(rows=rows, tokens=tokens, segment=8)
    batches = make_batches(lengths, limits, padding=padding)
    assert sorted(np.concatenate([[], *batches]).tolist()) == list(range(len(lengths)))
    for batch in batches:
        own = [lengths[index] for index in batch]
        assert len(own) in limits.sizes
        assert len(own) == 1 or len(own) * min(max(own), 8) <= tokens
        assert padding or len(set(own)) == 1


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_no_other_batches_of_neighbours_cost_less(lengths: list[int]) -> None:
    limits = BatchLimits(rows=4, tokens=10**6, segment=8)
    ordered = sorted(lengths, reverse=True)

    def cheapest(first: int) -> int:
        if first == len(ordered):
            return 0
        return min(
            naive_cost([ordered[first : first + size]], 8) + cheapest(first + size)
            for size in (1, 2, 4)
            if first + size <= len(ordered)
        )

    batches = make_batches(lengths, limits, padding=True)
    assert naive_cost([[lengths[index] for index in batch] for batch in batches], 8) == cheapest(0)


def test_a_text_far_longer_than_the_others_is_alone() -> None:
    batches = make_batches([20, 5000, 19, 20], BatchLimits(rows=4, tokens=1024, segment=64), padding=True)
    assert [1] in [batch.tolist() for batch in batches]
