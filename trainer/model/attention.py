"""Attention as it is trained: the naive form is in `naive.py`, and this one is tested against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[..., Tensor]  # the signature of `relative_attention`


@dataclass(frozen=True)
class Terms:
    """What one layer's scores depend on besides content; row d of a table [J, …] is for distance d.

    position [J, H, K]: r(d). bias [J, H]: added to r(d)'s score. u, v [H, K]: added to the query where it meets keys, and
    where it meets r(d). gate [J, H]: m(d), the soft span mask. Each may be None.
    window and epsilon go with a gate that is normalised as in the public code of adaptive spans: the softmax covers the
    distances up to `window`, and masked weights are divided by their sum plus `epsilon`.
    """

    position: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None
    gate: Tensor | None = None
    window: int | None = None
    epsilon: float = 0.0


NO_TERMS = Terms()


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    terms: Terms = NO_TERMS,
    persistent: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over J = M + T keys and N persistent ones: every model of both papers.

        score = ((q + u)·k + (q + v)·r(d) + bias(d)) / sqrt(K)      softmax, times m(d), normalised again, then values

    (Dai et al. 2019, section 3.3, with the shift of Appendix B; Sukhbaatar et al. 2019b, equations 3 to 9).
    query [B, T, H, K]; key, value [B, J, H, K], the queries' own keys last; visible [B, T, J]; persistent: keys and values
    [H, N, K], seen by every query at no distance. Returns [B, T, H, K], zero where a query sees nothing.
    `dropout` falls on the weights.
    """
    J, own = key.shape[1], None if persistent is None else persistent[0]
    weights = F.dropout(attention_weights(query, key, visible=visible, terms=terms, persistent=own), dropout)
    answer = torch.einsum("bhtj,bjhk->bthk", weights[..., :J], value)
    if persistent is not None:
        answer = answer + torch.einsum("bhtn,hnk->bthk", weights[..., J:], persistent[1])
    return answer


def attention_weights(
    query: Tensor, key: Tensor, *, visible: Tensor, terms: Terms = NO_TERMS, persistent: Tensor | None = None
) -> Tensor:
    """The weights [B, H, T, J + N] of `relative_attention`, those of persistent keys [H, N, K] last."""
    T, J, scale = query.shape[1], key.shape[1], query.shape[-1] ** -0.5
    scores_BHTJ = torch.einsum("bthk,bjhk->bhtj", query if terms.u is None else query + terms.u, key)
    if terms.position is not None:
        scores_BHTJ = scores_BHTJ + position_scores(query, terms)
    if terms.window is not None:
        distance = torch.arange(J - T, J, device=key.device)[:, None] - torch.arange(J, device=key.device)
        visible = visible & (distance <= terms.window)
    scores = (scores_BHTJ * scale).masked_fill(~visible[:, None], float("-inf"))
    if persistent is not None:
        scores = torch.cat([scores, torch.einsum("bthk,hnk->bhtn", query, persistent) * scale], dim=-1)
        weights = scores.softmax(dim=-1)
    else:  # no row may be all -inf: its softmax, and its gradient, would be NaN
        blind = ~visible.any(dim=-1)[:, None, :, None]
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    if terms.gate is None:
        return weights
    gate_HTJ = shift(terms.gate.flip(0).T[None, :, None].expand(1, -1, T, -1))[0]
    weights = torch.cat([weights[..., :J] * gate_HTJ, weights[..., J:]], dim=-1)
    total = weights.sum(dim=-1, keepdim=True) + terms.epsilon
    return weights / torch.where(total > 0, total, 1.0)  # a query that sees nothing keeps its zeros


def position_scores(query: Tensor, terms: Terms) -> Tensor:
    """(q + v)·r(d) + bias(d) of every query and key, [B, H, T, J], before division by sqrt(K)."""
    assert terms.position is not None
    scores_BHTJ = torch.einsum(
        "bthk,jhk->bhtj", query if terms.v is None else query + terms.v, terms.position.flip(0)
    )
    if terms.bias is not None:
        scores_BHTJ = scores_BHTJ + terms.bias.flip(0).T[:, None]
    return shift(scores_BHTJ)


def shift(scores: Tensor) -> Tensor:
    """Moves row i of [B, H, T, J] left by T - 1 - i, so that the column of a distance becomes that of its key.

    What enters on the right belongs to future keys and is masked. Linear in the scores (Appendix B).
    """
    B, H, T, J = scores.shape
    padded = F.pad(scores, (1, 0)).view(B, H, J + 1, T)
    return padded[:, :, 1:].reshape(B, H, T, J)
