"""Independent texts for tests, the naive score of one text alone, and a session that keeps what it is fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runtimes import Memory, Session, TextToScore, score_texts
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import IdsVocab, SpecialTokens
from tests.from_logits import FromLogits

SIZE = 40  # ids that every vocabulary of these tests has


def alone(session: Session, text: Sequence[int], context: Sequence[int] = ()) -> np.ndarray:
    """The naive answer: the log-probabilities of one text in a memory of its own.

    The context is fed, then the text, each in segments of its own. The last token of the context is the first
    input of the text.
    """
    whole = np.array([*context, *text], np.int64)
    fed, stream = np.split(whole, [max(0, len(context) - 1)])
    memory, segment = session.start(1), session.rule.segment
    for at in range(0, len(fed), segment):
        _, memory = session.predict(fed[None, at : at + segment], memory)
    answers = [np.zeros(0)]
    for at in range(0, len(stream) - 1, segment):
        inputs, targets = stream[:-1][at : at + segment], stream[1:][at : at + segment]
        log_probs, memory = session.score(inputs[None], targets[None], memory)
        answers.append(log_probs[0])
    return np.concatenate(answers)


def same_as_alone(session: Session, texts: Sequence[TextToScore], **options: Any) -> None:
    scores = list(score_texts(session, texts, tokens=True, **options))
    assert [score.id for score in scores] == [text.id for text in texts]
    for score, text in zip(scores, texts, strict=True):
        expected = alone(session, text.text, text.context)  # type: ignore[arg-type]
        assert score.tokens == len(expected)
        assert np.abs(score.token_log_probs - expected).max(initial=0) <= 1e-4, text
        assert score.log_prob == pytest.approx(expected.sum(), abs=1e-4)


def some_texts(seed: int) -> list[TextToScore]:
    draw = np.random.default_rng(seed)
    shared = [draw.integers(0, SIZE, length).tolist() for length in (0, 1, 2, 9, 27, 28, 30, 31)]
    return [
        TextToScore(
            text=draw.integers(0, SIZE, int(draw.integers(0, 21))).tolist(),
            context=shared[draw.integers(len(shared))],
            id=number,
        )
        for number in range(40)
    ]


class Counting(FromLogits):
    """A session over ids that predicts the token that it was just fed with log-probability RIGHT.

    It keeps what it was fed, as pairs of position and token, and how many rows each of its memories had.
    """

    identity, rule, state, spec = "counting", MemoryRule(mem_len=4, segment=6), (), None
    vocab: Any = IdsVocab(9, special=SpecialTokens(beginning=7, end_of_document=8, unknown=6))

    def __init__(self) -> None:
        self.fed: list[list[tuple[int, int]]] = []
        self.started: list[int] = []

    def start(self, batch: int) -> Memory:
        self.started.append(batch)
        return Memory(np.zeros(batch, np.int64), {}, self.identity)

    def step(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        for row, position in zip(tokens, memory.positions, strict=True):
            self.fed.append([(int(position) + at, int(token)) for at, token in enumerate(row)])
        logits = np.zeros((*tokens.shape, self.vocab.size), np.float32)
        np.put_along_axis(logits, tokens[..., None], 5.0, axis=-1)
        memory.positions += tokens.shape[1]
        return logits, memory
