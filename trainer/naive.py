"""The truth about relative attention: one query, one key and one distance at a time. Slow, for tests only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, *, u: Tensor, v: Tensor, visible: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same contract as `attention.relative_attention`, written as equation (section 3.3) over explicit distances."""
    B, T, H, K = query.shape
    J = key.shape[1]
    rows = []
    for b in range(B):
        for i in range(T):
            keys = [j for j in range(J) if visible[b, i, j]]
            scores_H = []
            for j in keys:
                distance = (J - T + i) - j
                content = ((query[b, i] + u) * key[b, j]).sum(-1)
                relative = ((query[b, i] + v) * position[distance]).sum(-1)
                scores_H.append((content + relative) / K**0.5)
            weights_HJ = F.dropout(torch.stack(scores_H, dim=-1).softmax(dim=-1), dropout)
            rows.append(torch.einsum("hj,jhk->hk", weights_HJ, value[b, keys]))
    return torch.stack(rows).view(B, T, H, K)
