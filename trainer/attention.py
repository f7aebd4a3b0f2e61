"""Relative attention as it is trained: the naive form is in `naive.py`, and this one is tested against it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[..., Tensor]  # the signature of `relative_attention`


def sinusoids(distances: Tensor, d_model: int) -> Tensor:
    """Position vectors R, float64 [N, D], of distances [N]: [sin(d f), cos(d f)] with f = 10000^(-2i/D).

    The halves are not interleaved, as in the public code.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    angles = distances.double()[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, *, u: Tensor, v: Tensor, visible: Tensor, dropout: float = 0.0
) -> Tensor:
    """Attention over J = M + T keys with the four terms of section 3.3, and the shift of Appendix B.

    query [B, T, H, K]; key, value [B, J, H, K], the queries' own keys last; position [J, H, K], row d for
    distance d (W_kR R_d); u, v [H, K]; visible [B, T, J]. Returns [B, T, H, K]. `dropout` falls on the weights.
    """
    content_BHTJ = torch.einsum("bthk,bjhk->bhtj", query + u, key)
    position_BHTJ = shift(torch.einsum("bthk,jhk->bhtj", query + v, position.flip(0)))
    scores_BHTJ = (content_BHTJ + position_BHTJ) * query.shape[-1] ** -0.5
    scores_BHTJ = scores_BHTJ.masked_fill(~visible[:, None], float("-inf"))
    weights_BHTJ = F.dropout(scores_BHTJ.softmax(dim=-1), dropout)
    return torch.einsum("bhtj,bjhk->bthk", weights_BHTJ, value)


def shift(scores: Tensor) -> Tensor:
    """Moves row i of [B, H, T, J] left by T - 1 - i, so that the column of a distance becomes that of its key.

    What enters on the right belongs to future keys and is masked. Linear in the scores (Appendix B).
    """
    B, H, T, J = scores.shape
    padded = F.pad(scores, (1, 0)).view(B, H, J + 1, T)
    return padded[:, :, 1:].reshape(B, H, T, J)
