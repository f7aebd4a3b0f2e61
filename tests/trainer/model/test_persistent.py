"""Persistent vectors: each way of Figure 2 (Sukhbaatar et al.

2019b) against its definition, one query and head at a time.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer.model.attention import Terms, relative_attention
from trainer.model.config import ModelConfig
from trainer.model.persistent import PersistentVectors

T, H, K, N = 3, 4, 3, 5


def build(sublayers: str) -> PersistentVectors:
    config = ModelConfig(layers=1, d_model=6, heads=H, head_dim=K, sublayers=sublayers, persistent=N)  # type: ignore[arg-type]
    module = PersistentVectors(config).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def softmax(scores: list[float]) -> list[float]:
    exponentials = [math.exp(score) for score in scores]
    return [value / sum(exponentials) for value in exponentials]


def weighted(weights: list[float], values: list[Tensor]) -> Tensor:
    return sum(
        (weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(values[0])
    )


def definition(
    sublayers: str, module: PersistentVectors, q: Tensor, k: Tensor, v: Tensor, i: int, h: int
) -> Tensor:
    """Answer [K] of head h at position i; the context is tokens 0 … i, without positions."""
    key, value = module.scaled()
    scale = 1 / math.sqrt(K)
    context = [scale * (q[i, h] @ k[j, h]).item() for j in range(i + 1)], [v[j, h] for j in range(i + 1)]
    if sublayers == "head-split":
        if h < H // 2:
            return weighted(softmax(context[0]), context[1])
        own = [scale * (q[i, h] @ row).item() for row in key[h - H // 2]]
        return weighted(softmax(own), list(value[h - H // 2]))
    if sublayers == "single-head":
        whole = [(q[i].flatten() @ row).item() / math.sqrt(H * K) for row in key[0]]
        mine = weighted(softmax(whole), list(value[0]))[h * K : (h + 1) * K]
        return weighted(softmax(context[0]), context[1]) + mine
    own = [scale * (q[i, h] @ row).item() for row in key[h]]
    if sublayers == "attn-split":
        return weighted(softmax(context[0]), context[1]) + weighted(softmax(own), list(value[h]))
    return weighted(softmax(context[0] + own), context[1] + list(value[h]))


@pytest.mark.parametrize("sublayers", ["all-attention", "attn-split", "head-split", "single-head"])
def test_each_way_equals_its_definition(sublayers: str) -> None:
    module, generator = build(sublayers), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, H, K, generator=generator, dtype=torch.float64) for _ in range(3))
    visible = torch.ones(T, T, dtype=torch.bool).tril()[None]
    answer = module.attend(
        q[None], k[None], v[None], attention=relative_attention, visible=visible, terms=Terms(), dropout=0.0
    )
    for i in range(T):
        for h in range(H):
            torch.testing.assert_close(answer[0, i, h], definition(sublayers, module, q, k, v, i, h))


def test_vectors_start_with_unit_variance_after_scaling() -> None:
    config = ModelConfig(layers=1, d_model=6, heads=8, head_dim=64, sublayers="all-attention", persistent=256)
    module = PersistentVectors(config)
    torch.manual_seed(0)
    module.reset_parameters()
    for scaled in module.scaled():
        assert scaled.std().item() == pytest.approx(1.0, abs=0.02)
