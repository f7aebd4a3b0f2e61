"""Attention for one query, one key and one distance at a time; it is slow and only for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.attention import NO_TERMS, Terms


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    terms: Terms = NO_TERMS,
    persistent: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns the answers of `attention.relative_attention`, computed directly from its equation.

    The arguments are the same.
    """
    B, T, H, K = query.shape
    J = key.shape[1]
    rows = []
    for b in range(B):
        for i in range(T):
            scores = []
            masks = []
            values = []
            for j in range(J):
                if not visible[b, i, j]:
                    continue
                distance = (J - T + i) - j
                if terms.window is not None and distance > terms.window:
                    continue
                scores.append(_score(query[b, i], key[b, j], distance, terms) / K**0.5)
                masks.append(torch.ones(H).to(query) if terms.gate is None else terms.gate[distance])
                values.append(value[b, j])
            for n in range(0 if persistent is None else persistent[0].shape[1]):
                assert persistent is not None
                scores.append((query[b, i] * persistent[0][:, n]).sum(-1) / K**0.5)
                masks.append(torch.ones(H).to(query))
                values.append(persistent[1][:, n])
            if not scores:
                rows.append(0 * query[b, i])
                continue
            weights_HJ = torch.stack(scores, dim=-1).softmax(dim=-1) * torch.stack(masks, dim=-1)
            weights_HJ = weights_HJ / (weights_HJ.sum(dim=-1, keepdim=True) + terms.epsilon)
            weights_HJ = F.dropout(weights_HJ, dropout)
            rows.append(torch.einsum("hj,jhk->hk", weights_HJ, torch.stack(values)))
    return torch.stack(rows).view(B, T, H, -1)


def _score(query: Tensor, key: Tensor, distance: int, terms: Terms) -> Tensor:
    """Returns the scores [H] of one query and key [H, K] at a distance, before division by sqrt(K)."""
    score = ((query if terms.u is None else query + terms.u) * key).sum(-1)
    if terms.position is not None:
        score = score + ((query if terms.v is None else query + terms.v) * terms.position[distance]).sum(-1)
    if terms.bias is not None:
        score = score + terms.bias[distance]
    return score
