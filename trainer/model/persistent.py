"""Persistent vectors: keys and values that are parameters (Sukhbaatar et al. 2019b, section 4)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.model.attention import AttentionFunction, Terms
from trainer.model.config import ModelConfig


def persistent_attention(query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Returns answers [B, T, H, K] of attention over persistent keys and values [H, N, K]."""
    scores_BHTN = torch.einsum("bthk,hnk->bhtn", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("bhtn,hnk->bthk", F.dropout(scores_BHTN.softmax(dim=-1), dropout), value)


class PersistentVectors(nn.Module):
    """N keys and values [H, N, K] of one layer (Sukhbaatar et al. 2019b, section 5.1).

    Keys are stored divided by sqrt(K), and values by sqrt(N). `sublayers` of the configuration says how they
    are combined with attention over the context (Figure 2).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, width = config.heads, config.head_dim
        if config.sublayers == "head-split":
            heads //= 2
        elif config.sublayers == "single-head":
            width = heads * width
            heads = 1
        elif config.sublayers == "ff-attn":
            heads = 1
            width = config.d_model
        self.key = nn.Parameter(torch.empty(heads, config.persistent, width))
        self.value = nn.Parameter(torch.empty(heads, config.persistent, width))

    def reset_parameters(self) -> None:
        """Draws normal values so that `scaled` keys and values have unit variance."""
        nn.init.normal_(self.key, std=self.key.shape[-1] ** -0.5)
        nn.init.normal_(self.value, std=self.value.shape[1] ** -0.5)

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values for attention: multiplied by sqrt(K) and sqrt(N) again."""
        return self.key * self.key.shape[-1] ** 0.5, self.value * self.value.shape[1] ** 0.5

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention: AttentionFunction,
        visible: Tensor,
        terms: Terms,
        dropout: float,
    ) -> Tensor:
        """Returns answers [B, T, H, K] of attention over context and persistent vectors.

        `sublayers` of the configuration says how the two are combined.
        """
        if self.config.sublayers == "all-attention":
            return attention(
                query, key, value, visible=visible, terms=terms, persistent=self.scaled(), dropout=dropout
            )
        if self.config.sublayers == "head-split":
            # The second half of the heads attends only to persistent vectors.
            half = self.config.heads // 2
            first = _first_heads(terms, half)
            pieces = (x[:, :, :half] for x in (query, key, value))
            context = attention(*pieces, visible=visible, terms=first, dropout=dropout)
            return torch.cat(
                [context, persistent_attention(query[:, :, half:], *self.scaled(), dropout=dropout)], dim=2
            )
        context = attention(query, key, value, visible=visible, terms=terms, dropout=dropout)
        whole = query.flatten(2)[:, :, None] if self.config.sublayers == "single-head" else query
        return context + persistent_attention(whole, *self.scaled(), dropout=dropout).reshape(query.shape)


def _first_heads(terms: Terms, count: int) -> Terms:
    """Returns the terms of the first `count` heads."""
    cut = {name: getattr(terms, name) for name in ("position", "bias", "u", "v", "gate")}
    axis = {"position": 1, "bias": 1, "u": 0, "v": 0, "gate": 1}
    return replace(
        terms, **{name: x.narrow(axis[name], 0, count) for name, x in cut.items() if x is not None}
    )
