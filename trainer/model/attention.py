"""The fast form of attention over memory and segment.

`naive.py` computes the same equation step by step, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.blocked import BlockedAttention, flipped, pieces, toeplitz

AttentionFunction = Callable[..., Tensor]  # with the signature of `relative_attention`


@dataclass(frozen=True)
class Terms:
    """The terms of one layer's scores that do not depend only on content; each may be None.

    Row d of an array [J, …] is for distance d.
    """

    position: Tensor | None = None  # [J, H, K]: the position vectors r(d)
    bias: Tensor | None = None  # [J, H]: a number for each distance
    u: Tensor | None = None  # [H, K]: added to the query in its product with keys
    v: Tensor | None = None  # [H, K]: added to the query in its product with r(d)
    gate: Tensor | None = None  # [J, H]: m(d), the soft span mask
    longest: int | None = None
    """The largest distance that has a weight, if that is known. It changes no answer: what lies beyond it
    need not be computed.
    """
    window: Tensor | int | None = None
    """Longest distance in the softmax, for a gate that is normalised as in the public code of adaptive spans:
    masked weights are divided by their sum plus `epsilon`.
    """
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
    """Returns answers [B, T, H, K] of attention over J = M + T keys and N persistent ones.

        score = ((q + u)·k + (q + v)·r(d) + bias(d)) / sqrt(K)   softmax, times m(d), normalised, then values

    Every model of both papers uses this equation (Dai et al. 2019, section 3.3, with the shift of Appendix B;
    Sukhbaatar et al. 2019b, equations 3 to 9).

    - query [B, T, H, K].
    - key, value [B, J, H, K]: the queries' own tokens come last.
    - visible bool [B, T, J]: the keys that each query attends to.
    - persistent: keys and values [H, N, K] that are visible to every query and have no distance.
    - dropout: the probability that a weight is dropped.

    The answer of a query without visible keys is zero.
    """
    on_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and (persistent is None or terms.u is None):  # persistent scores are q·k, without u
        return blocked_attention(
            query, key, value, visible=visible, terms=terms, persistent=persistent, dropout=dropout
        )
    J = key.shape[1]
    own = None if persistent is None else persistent[0]
    weights = F.dropout(attention_weights(query, key, visible=visible, terms=terms, persistent=own), dropout)
    answer = torch.einsum("bhtj,bjhk->bthk", weights[..., :J], value)
    if persistent is not None:
        answer = answer + torch.einsum("bhtn,hnk->bthk", weights[..., J:], persistent[1])
    return answer


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    terms: Terms,
    persistent: tuple[Tensor, Tensor] | None,
    dropout: float,
) -> Tensor:
    """`relative_attention` by `blocked.BlockedAttention`, with one score or more kept in the cache."""
    B, T, H, K = query.shape
    J = key.shape[1]
    scale = K**-0.5
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):
        content = (query if terms.u is None else query + terms.u) * scale
        positional = (query if terms.v is None else query + terms.v) * scale
        parts = pieces(H, B, T, J, terms.longest, dtype.itemsize)
        C = parts[0].C  # of the largest block
        W = J if terms.longest is None else min(J, terms.longest + C)
        # In a sum `-inf` would make NaN of a query that sees nothing. Scores are too small to change half of
        # the lowest number, and softmax subtracts the largest score before anything else: the scores of such
        # a query differ by exactly 0. Its answer is set to 0 afterwards.
        visible = within_window(visible, terms, J)
        hidden = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min / 2)
        first = [
            None if tensor is None else tensor.to(dtype).permute(2, 0, 1, 3).contiguous()
            for tensor in (content, None if terms.position is None else positional, key, value)
        ]
        rows = None if terms.position is None else flipped(terms.position.to(dtype), W).contiguous()
        bias = None if terms.bias is None else toeplitz((terms.bias * scale).to(dtype), C, W)
        gate = None if terms.gate is None else toeplitz(terms.gate.to(dtype), C, W)
        own = (None, None) if persistent is None else (persistent[0].to(dtype), persistent[1].to(dtype))
        blind = None if persistent is not None else ~visible.any(-1, keepdim=True)
        options = (parts, terms.epsilon, dropout)
        answer: Tensor = BlockedAttention.apply(  # type: ignore[no-untyped-call]
            *first, rows, bias, gate, *own, hidden, blind, *options
        )
    return answer.permute(1, 2, 0, 3)


def within_window(visible: Tensor, terms: Terms, J: int) -> Tensor:
    """Visibility [B, T, J] without the keys beyond the window of the softmax."""
    if terms.window is None:
        return visible
    T = visible.shape[1]
    keys = torch.arange(J, device=visible.device)
    return visible & (keys[J - T :, None] - keys <= terms.window)


def attention_weights(
    query: Tensor, key: Tensor, *, visible: Tensor, terms: Terms = NO_TERMS, persistent: Tensor | None = None
) -> Tensor:
    """Returns the weights [B, H, T, J + N] of `relative_attention`.

    persistent: the persistent keys [H, N, K], whose weights come last.
    """
    T = query.shape[1]
    J = key.shape[1]
    scale = query.shape[-1] ** -0.5
    scores_BHTJ = torch.einsum("bthk,bjhk->bhtj", query if terms.u is None else query + terms.u, key)
    if terms.position is not None or terms.bias is not None:
        scores_BHTJ = scores_BHTJ + position_scores(query, terms)
    visible = within_window(visible, terms, J)
    scores = (scores_BHTJ * scale).masked_fill(~visible[:, None], float("-inf"))
    if persistent is not None:
        scores = torch.cat([scores, torch.einsum("bthk,hnk->bhtn", query, persistent) * scale], dim=-1)
        weights = scores.softmax(dim=-1)
    else:  # a row that is all -inf would have NaN for softmax and for gradient
        blind = ~visible.any(dim=-1)[:, None, :, None]
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    if terms.gate is None:
        return weights
    gate_HTJ = shift(terms.gate.flip(0).T[None, :, None].expand(1, -1, T, -1))[0]
    weights = torch.cat([weights[..., :J] * gate_HTJ, weights[..., J:]], dim=-1)
    total = weights.sum(dim=-1, keepdim=True) + terms.epsilon
    return weights / torch.where(total > 0, total, 1.0)  # the weights of a query that sees nothing stay 0


def position_scores(query: Tensor, terms: Terms) -> Tensor:
    """Returns (q + v)·r(d) + bias(d) of every query and key, [B, H, T, J], before division by sqrt(K).

    The terms must have position vectors, a bias, or both.
    """
    # Flipped tables have in column j the value of key j for the last query. `shift` moves the other rows.
    bias_HTJ = None if terms.bias is None else terms.bias.flip(0).T[:, None]
    if terms.position is None:
        assert bias_HTJ is not None, "the layer has no terms by distance"
        B, T = query.shape[:2]
        return shift(bias_HTJ.expand(B, -1, T, -1))
    scores_BHTJ = torch.einsum(
        "bthk,jhk->bhtj", query if terms.v is None else query + terms.v, terms.position.flip(0)
    )
    return shift(scores_BHTJ if bias_HTJ is None else scores_BHTJ + bias_HTJ)


def shift(scores: Tensor) -> Tensor:
    """Returns scores by key, [B, H, T, J], for scores by distance.

    Row i is moved left by T - 1 - i (Dai et al. 2019, Appendix B). The values that enter on the right belong
    to future keys, which the mask hides.
    """
    B, H, T, J = scores.shape
    return F.pad(scores, (1, 0)).view(B, H, -1)[:, :, T:].view(B, H, T, J)
