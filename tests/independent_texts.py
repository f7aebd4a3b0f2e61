"""Independent texts for tests, and the naive score of one text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runtimes import Session, TextToScore, score_texts

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
