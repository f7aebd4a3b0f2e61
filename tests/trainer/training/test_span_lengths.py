"""Training computes only as far back as spans go, and that changes neither losses nor gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, SpanConfig
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.snapshot import Writer, save
from trainer.training.span_lengths import length_for
from trainer.training.state import Training

SPAN = 300  # the longest span; of 64 tokens that are dropped together it has four and a rest
RULE = MemoryRule(mem_len=SPAN, segment=40, include_self=False)


def config(kind: str, **span: Any) -> TrainConfig:
    model = ModelConfig(
        layers=2,
        d_model=8,
        heads=2,
        head_dim=4,
        persistent=3,
        sublayers="all-attention",
        positions="learned",
        context=SPAN + 41,
        vocab_size=11,
        span=SpanConfig(**{"maximum": SPAN, "ramp": 16} | span),
    )
    return TrainConfig(
        model=model,
        training=RULE,
        evaluation=RULE,
        batch=2,
        steps=100,
        threads=1,
        optimizer=OptimizerConfig(kind=kind, lr=0.02, clip=0.1),  # type: ignore[arg-type]
    )


def gradients(training: Training) -> dict[str, Tensor]:
    return {name: p.grad for name, p in training.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_short_spans_train_as_the_whole_memory(epsilon: float) -> None:
    """Also while spans grow beyond a multiple of 64."""
    tokens_BN = torch.randint(0, 11, (2, 1000), generator=torch.Generator().manual_seed(1)).numpy()
    short, whole = (Training.start(config("adam", epsilon=epsilon)) for _ in range(2))
    whole.span_lengths.spans = []  # `current` is None then
    shares = [[0.02, 0.1], [0.5, 0.0]]
    for training in (short, whole):
        for span, share in zip(training.model.spans(), shares, strict=True):
            span.share.data = torch.tensor(share)
            span.share.register_hook(lambda gradient: gradient - 0.1)  # so that spans grow
    seen = []
    for _ in range(14):
        losses = [float(training.advance(tokens_BN).nats) for training in (short, whole)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        for name, gradient in gradients(short).items():
            torch.testing.assert_close(gradient, gradients(whole)[name], rtol=1e-4, atol=1e-6)
        seen.append(short.span_lengths.lengths)
        # The same weights again, so that rounding does not add up.
        whole.model.load_state_dict(short.model.state_dict())
    assert len({first for first, _ in seen}) > 1, "no span grew beyond a multiple of 64"
    assert all(first < SPAN for first, _ in seen), "nothing was left out"


@pytest.mark.parametrize(("kind", "clip"), [("adam", 1e9), ("adamw", 1e9), ("adagrad", 0.1)])
def test_spans_grow_no_faster_than_the_bound(kind: str, clip: float) -> None:
    """The worst gradients for Adam grow by the factor β₂ / β₁ in each step."""
    closest = 0.0
    for pattern in (lambda i: -0.1, lambda i: -((0.999 / 0.9) ** i), lambda i: -(10.0 ** (i % 7))):
        training = Training.start(
            dataclasses.replace(config("adam"), optimizer=OptimizerConfig(kind=kind, clip=clip))  # type: ignore[arg-type]
        )
        (span, _), lengths = training.model.spans(), training.span_lengths
        for state in training.optimizer.state.values():
            state["step"].fill_(10_000)  # the corrections of Adam's first steps are over
        for i in range(60):
            for parameter in training.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            span.share.grad = torch.full_like(span.share, pattern(i))
            before = span.share.detach().max().item()
            lengths.forget()
            lengths.current()
            training._update(0.001)
            grown = (span.share.detach().max().item() - before) * SPAN
            assert grown <= lengths.grown[0] * (1 + 1e-4) + 1e-5
            closest = max(closest, grown / lengths.grown[0])
    assert closest > 0.5, "the bound says little"


def test_spans_are_read_anew_after_a_checkpoint(tmp_path: Path) -> None:
    training = Training.start(config("adam"))
    tokens_BN = torch.randint(0, 11, (2, 1000)).numpy()
    training.advance(tokens_BN)
    assert training.span_lengths.read
    with Writer(tmp_path) as writer:
        save(training, writer)
    assert not training.span_lengths.read


@pytest.mark.parametrize(("tokens", "length"), [(0.0, 64), (47.5, 64), (48.0, 128), (1000.0, SPAN)])
def test_lengths_hold_span_ramp_and_one_more(tokens: float, length: int) -> None:
    span = Training.start(config("adam")).model.spans()[0]
    assert length_for(span, tokens) == length
    assert length_for(span, float("nan")) == SPAN
