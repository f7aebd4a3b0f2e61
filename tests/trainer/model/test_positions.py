"""Positions that are added to the input: only those that are looked up are computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainer.model.positions as positions
from trainer.model.config import ModelConfig


@pytest.mark.parametrize("from_segment_end", [False, True])
def test_absolute_positions_compute_no_more_rows_than_they_look_up(
    monkeypatch: pytest.MonkeyPatch, from_segment_end: bool
) -> None:
    computed, sinusoids = [], positions.sinusoids

    def spy(distances: Tensor, *arguments: object) -> Tensor:
        computed.append(len(distances))
        return sinusoids(distances, *arguments)

    monkeypatch.setattr(positions, "sinusoids", spy)
    answers = []
    for context in (8, 1000):
        config = ModelConfig(
            layers=1, d_model=4, heads=1, head_dim=4, d_ff=4, positions="absolute", context=context,
            from_segment_end=from_segment_end,
        )  # fmt: skip
        table = positions.make_positions(config)
        answers.append(table.embed(0, torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [4, 5, 6]])))
    assert torch.equal(*answers)
    assert computed == ([3, 3] if from_segment_end else [7, 7])
