"""The model with keys and values for memory in place of hidden states: each token's are computed once, not in every segment.

For inference alone: no dropout, no gradients. The answers are those of `LanguageModel.layers`, which projects M remembered
hidden states for the T tokens of a segment and is tested against the papers; this form is tested against that one. Its attention
is that of `trainer/attention.py` with half of the passes over the scores, which are most of what a long memory costs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from runtimes.rule import MemoryRule
from trainer.attention import Terms, relative_attention
from trainer.model import Block, LanguageModel, Sight, look


class ProjectedModel:
    """Steps of a model under one rule; the position vectors of all layers and distances are computed at the start."""

    def __init__(self, model: LanguageModel, rule: MemoryRule) -> None:
        self.model, self.rule = model, rule
        with torch.inference_mode():
            vectors = model.positions.vectors(rule.slots, rule)
            self.terms, self.tables = [], []
            for layer in range(len(model.blocks)):
                terms = model.positions.terms(layer, vectors)
                table = None if terms.position is None else terms.position.flip(0).transpose(0, 1).contiguous()
                self.terms.append(replace(terms, position=None))
                self.tables.append(table)

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
                assert isinstance(block, Block)
                x = self.model.positions.embed(layer, x, sight.positions)
                past = memory[2 * layer : 2 * layer + 2]
                mine = replace(sight, attention=partial(attention_by_table, table=self.tables[layer]))
                x, kept = _block(block, x, past, self.terms[layer], mine)
                after += [array[:, :, T:] for array in kept]
            return self.model.last([x]), after


def attention_by_table(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    table: Tensor | None,
    visible: Tensor,
    terms: Terms,
    persistent: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`relative_attention` with the position vectors as a table [H, S, K] of these heads and perhaps more, the nearest last.

    The soft span mask that multiplies after the softmax and normalises again is its logarithm added before it.
    """
    assert not dropout, "this attention is for inference"
    J, scale = key.shape[1], query.shape[-1] ** -0.5
    query, key, value = (x.transpose(1, 2) for x in (query * scale, key, value))
    content, asking = (query if pair is None else query + pair[:, None] * scale for pair in (terms.u, terms.v))
    scores_BHTJ = content @ key.transpose(2, 3)
    by_distance = _by_distance(asking, J, scale, table, terms)
    if by_distance is not None:
        scores_BHTJ += _shifted(by_distance)
    scores_BHTJ.masked_fill_(~visible[:, None], float("-inf"))
    if persistent is not None:
        scores = torch.cat([scores_BHTJ, query @ persistent[0].transpose(1, 2)], dim=-1)
        weights = scores.softmax(dim=-1)
        return (weights[..., :J] @ value + weights[..., J:] @ persistent[1]).transpose(1, 2)
    weights = scores_BHTJ.softmax(dim=-1)
    if terms.gate is not None or not bool(visible.any(dim=-1).all()):
        weights = weights.nan_to_num(nan=0.0)  # a query that sees nothing has the answer zero
    return (weights @ value).transpose(1, 2)


def _by_distance(asking: Tensor, J: int, scale: float, table: Tensor | None, terms: Terms) -> Tensor | None:
    """What its distance adds to each score, [B, H, T, J], that of distance J - 1 first; None where that is nothing."""
    B, H, T, _ = asking.shape
    scores = None if table is None else asking @ table[:H, -J:].transpose(1, 2)
    for column in (
        None if terms.bias is None else terms.bias[:J] * scale,
        None if terms.gate is None else terms.gate[:J].log(),
    ):
        if column is not None:
            row = column.flip(0).T[:, None]  # [H, 1, J]
            scores = row.expand(B, H, T, J).contiguous() if scores is None else scores.add_(row)
    return scores


def _shifted(scores: Tensor) -> Tensor:
    """`trainer.attention.shift` as a view: row i begins T - 1 - i columns later; what follows its last key belongs to no key."""
    B, H, T, J = scores.shape
    return scores.as_strided((B, H, T, J), (H * T * J, T * J, J - 1, 1), T - 1)


def _block(block: Block, x: Tensor, past: list[Tensor], terms: Terms, sight: Sight) -> tuple[Tensor, list[Tensor]]:
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
