"""Positions that are added to the input: only those that are looked up are computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainer.model.positions as positions
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig


@pytest.mark.parametrize("from_segment_end", [False, True])
def test_absolute_positions_tabulate_only_short_contexts(
    monkeypatch: pytest.MonkeyPatch, from_segment_end: bool
) -> None:
    computed, sinusoids = [], positions.sinusoids

    def spy(distances: Tensor, *arguments: object) -> Tensor:
        computed.append(len(distances))
        return sinusoids(distances, *arguments)

    monkeypatch.setattr(positions, "sinusoids", spy)
    answers = []
    for context in (8, 1 << 22):
        config = ModelConfig(
            layers=1,
            d_model=4,
            heads=1,
            head_dim=4,
            d_ff=4,
            positions="absolute",
            context=context,
            from_segment_end=from_segment_end,
        )
        table = positions.make_positions(config)
        for _ in range(2):
            answers.append(table.embed(0, torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [4, 5, 6]])))
    assert all(torch.equal(answers[0], other) for other in answers)
    assert computed == ([8, 3, 3] if from_segment_end else [8, 6, 6])  # the short table is kept


def test_kept_sinusoids_are_few_and_none_comes_from_inference() -> None:
    """A model keeps no table for every length; PyTorch refuses inference tensors in training."""
    config = ModelConfig(layers=1, d_model=4, heads=1, head_dim=4, d_ff=4)
    own = positions.make_positions(config)
    for count in range(1, 20):
        own.vectors(count, MemoryRule(mem_len=32, segment=1))
    assert 1 <= len(own._tables) <= positions.KEPT_TABLES
    with torch.inference_mode():
        own.vectors(30, MemoryRule(mem_len=32, segment=1))
    weight = torch.ones(4, requires_grad=True)
    (own.vectors(30, MemoryRule(mem_len=32, segment=1)) * weight).sum().backward()
    assert weight.grad is not None
