"""Adaptive spans: the mask, the penalty, the clamp, and that what is said to be out of reach is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.config import ModelConfig, SpanConfig
from trainer.model.span import AdaptiveSpan

SIZES: dict[str, Any] = {
    "layers": 1,
    "d_model": 4,
    "heads": 3,
    "head_dim": 2,
    "d_ff": 2,
    "positions": "learned",
    "context": 101,
}


def build(shares: list[float], context: int = 101, **span: Any) -> AdaptiveSpan:
    module = AdaptiveSpan(
        ModelConfig(
            **SIZES | {"heads": len(shares), "context": context}, span=SpanConfig(**{"maximum": 100} | span)
        )
    )
    module.share.data = torch.tensor(shares)
    return module


def test_the_mask_falls_over_the_ramp() -> None:
    mask = build([0.0, 0.1, 1.0], ramp=4).mask(102)
    # z = 0, 10, 100 tokens; m(d) = clamp((4 + z + 1 - d) / 4, 0, 1), and nothing beyond the maximum
    assert mask[:7, 0].tolist() == pytest.approx([1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert mask[9:17, 1].tolist() == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert mask[:101, 2].tolist() == [1] * 101
    assert mask[101, 2] == 0


@settings(max_examples=30)
@given(share=st.floats(0, 1, width=32), ramp=st.integers(1, 40), maximum=st.integers(1, 100))
def test_no_distance_beyond_the_longest_has_a_weight(share: float, ramp: int, maximum: int) -> None:
    module = build([share], ramp=ramp, maximum=maximum)
    (longest,) = module.longest_distances()
    mask = module.mask(202)[:, 0]
    assert mask[longest + 1 :].max() < 1e-5
    assert 1 <= longest <= maximum
    assert mask[longest] > 0 or (mask[longest - 1] <= 1 / ramp + 1e-5)


def test_spans_are_clamped_to_the_maximum_and_to_zero() -> None:
    module = build([-0.5, 0.5, 1.5])
    module.constrain()
    assert module.share.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("share", "maximum", "ramp", "window"),
    [
        (0.1, 256, 32, 64),  # of 256 tokens, 26 + 32 are needed: three steps of 64 are dropped
        (0.0, 256, 32, 64),
        (0.2, 256, 32, 128),
        (1.0, 256, 32, 256),
        (0.0, 64, 1, 64),  # at least one token is kept: 63 could be dropped, which is less than a step
    ],
)
def test_the_window_is_shortened_by_whole_steps(share: float, maximum: int, ramp: int, window: int) -> None:
    module = build([0.0, share], context=maximum + 1, maximum=maximum, ramp=ramp, epsilon=1e-8)
    assert module.window() == window
    assert module.remembered() == (window, window)
    plain = build([0.0, share], context=maximum + 1, maximum=maximum, ramp=ramp)
    assert plain.window() is None
    assert plain.remembered() == plain.longest_distances()
