"""Losses at a given context length, against one window at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.base.errors import ArtefactError, StreamError, TextError
from runtimes.base.logits import IMPOSSIBLE
from runtimes.contract.rule import MemoryRule
from runtimes.tasks import context_losses
from runtimes.tasks.context_losses import refuse_beyond_context, spread_positions
from tests.streams import feed

measure = context_losses.context_losses


@pytest.mark.parametrize("kind", ["ring", "torch"])
@pytest.mark.parametrize("context", [1, 8, 13])
def test_losses_are_those_of_single_windows(
    context: int, kind: str, sessions: dict[str, Session], tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_losses, "MAX_ROWS", 3)
    session = sessions[kind]
    positions = spread_positions(5000, count=7, longest=17)  # batches of 3, 3 and 1
    losses = measure(session, tokens[:5000], positions, context=context)
    assert losses.dtype == np.float32
    for position, nats in zip(positions, losses, strict=True):
        window = tokens[position - context : position]
        log_probs, _ = feed(session, window[None], [1] * context)
        assert nats == pytest.approx(-log_probs[0, -1, tokens[position]], abs=1e-4)


def test_full_mask_shows_the_last_token_a_whole_segment(
    make_run: Callable[..., Path], tokens: np.ndarray
) -> None:
    """Without memory a model sees its segment: a longer context changes nothing, and does not shorten the
    last segment.
    """
    session = open_session(make_run(rule=MemoryRule(mem_len=0, segment=8, mask="full")))
    positions = np.arange(100, 110)
    segment, longer = (measure(session, tokens, positions, context=context) for context in (8, 13))
    assert np.allclose(segment, longer, atol=1e-5)
    assert np.abs(measure(session, tokens, positions, context=7) - segment).max() > 1e-3


def test_positions_are_spread_over_those_with_enough_before_them() -> None:
    assert spread_positions(20, count=5, longest=10).tolist() == [10, 12, 14, 16, 18]
    assert spread_positions(12, count=2, longest=10).tolist() == [10, 11]
    with pytest.raises(TextError, match="12 tokens, 2 of them after 10 others, and 3 are asked for"):
        spread_positions(12, count=3, longest=10)
    with pytest.raises(TextError, match="0 of them"):
        spread_positions(3, count=1, longest=10)


def test_lengths_that_no_model_sees_are_refused(make_run: Callable[..., Path]) -> None:
    short, long = (open_session(make_run(rule=MemoryRule(mem_len=m, segment=4))) for m in (2, 9))
    refuse_beyond_context([short, long], 10)
    with pytest.raises(StreamError, match="goes to 11 and no model given sees more than 10 tokens"):
        refuse_beyond_context([short, long], 11)
    with pytest.raises(StreamError, match="more than 3"):
        refuse_beyond_context([short], 10)


def test_losses_that_are_not_finite_are_refused(make_run: Callable[..., Path], tokens: np.ndarray) -> None:
    session = open_session(make_run())
    session.model.vocabulary.output_bias["0"].data[:] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(ArtefactError, match="not a number"):
        measure(session, tokens, np.arange(20, 23), context=4)


def test_an_impossible_token_has_a_loss_that_is_a_number(
    make_run: Callable[..., Path], tokens: np.ndarray
) -> None:
    session = open_session(make_run())
    session.model.vocabulary.output_bias["0"].data[tokens[20]] = -float("inf")  # type: ignore[attr-defined]
    assert measure(session, tokens, np.array([20]), context=4) == [-IMPOSSIBLE]
