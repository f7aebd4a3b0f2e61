"""The model with keys and values for memory in place of hidden states: each token's are computed once, not in every segment.

For inference alone: no dropout, no gradients. The answers are those of `LanguageModel.layers`, which projects M remembered
hidden states for the T tokens of a segment and is tested against the papers; this form is tested against that one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from trainer.model.attention import Terms, relative_attention
from trainer.model.model import Block, LanguageModel, Sight, look


class ProjectedModel:
    """Steps of a model under one rule; the terms of all distances are computed at the start."""

    def __init__(self, model: LanguageModel, rule: MemoryRule) -> None:
        self.model, self.rule = model, rule
        with torch.inference_mode():
            vectors = model.positions.vectors(rule.slots, rule)
            self.terms = [model.positions.terms(layer, vectors) for layer in range(len(model.blocks))]

    def step(self, tokens: Tensor, memory: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output [B, T, D] and the memory after the segment.

        tokens int64 [B, T]; positions int64 [B]: of each row's first token; memory: keys and values of the layers in turn,
        2 L of [B, H, M, K].
        """
        T = tokens.shape[1]
        with torch.inference_mode():
            sight = look(T, positions, self.rule, relative_attention)
            x, after = self.model.embed(tokens), []
            for layer, block in enumerate(self.model.blocks):
                x = self.model.positions.embed(layer, x, sight.positions)
                past = memory[2 * layer : 2 * layer + 2]
                assert isinstance(block, Block)
                x, kept = _block(block, x, past, _nearest(self.terms[layer], self.rule.mem_len + T), sight)
                after += [array[:, :, T:] for array in kept]
            return self.model.last([x]), after


def _block(
    block: Block, x: Tensor, past: list[Tensor], terms: Terms, sight: Sight
) -> tuple[Tensor, list[Tensor]]:
    """`Block.forward` with the past's keys and values given; returns those of past and segment, [B, H, M + T, K], as well."""
    normal = block.attention_norm(x) if block.config.pre_norm else x
    asking = normal if block.config.query_norm else x
    own = [block.heads(project(normal)).transpose(1, 2) for project in (block.key, block.value)]
    kept = [torch.cat(pair, dim=2) for pair in zip(past, own, strict=True)]
    key, value = kept
    if sight.before is not None:  # memory of zeros: what a hidden state of zero is projected to
        zero = torch.zeros_like(x[:1, :1])
        zero = block.attention_norm(zero) if block.config.pre_norm else zero
        before = sight.before[:, None, :, None]
        blank = (block.heads(project(zero)).transpose(1, 2) for project in (block.key, block.value))
        key, value = (torch.where(before, empty, array) for empty, array in zip(blank, kept, strict=True))
    query = block.heads(block.query(asking))
    return block.rest(x, block.attend(query, key.transpose(1, 2), value.transpose(1, 2), terms, sight)), kept


def _nearest(terms: Terms, count: int) -> Terms:
    """The terms of distances 0 … count - 1."""
    tables: dict[str, Any] = {"position": terms.position, "bias": terms.bias}
    return replace(terms, **{name: table[:count] for name, table in tables.items() if table is not None})
