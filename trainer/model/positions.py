"""How a model knows where its tokens are: distances in the scores, or positions added to the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.contract.rule import MemoryRule
from trainer.model.attention import Terms
from trainer.model.config import ModelConfig


def frequencies(d_model: int) -> Tensor:
    """10000^(-2i/D), float64 [D/2]."""
    return 10000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model)


def sinusoids(distances: Tensor, d_model: int, stored: Tensor | None = None) -> Tensor:
    """Position vectors R, float64 [N, D], of distances [N]: [sin(d f), cos(d f)] with the frequencies above, or `stored` ones.

    The halves are not interleaved, as in the public code.
    """
    f = frequencies(d_model) if stored is None else stored.double().cpu()
    angles = distances.double().cpu()[:, None] * f
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Positions(nn.Module):
    """No positions at all; each kind below says what it adds."""

    frequencies: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer(
            "frequencies", frequencies(config.d_model).float() if config.stored_frequencies else None
        )

    def rows(self, position: Tensor) -> Tensor:
        """Rows of a table of absolute positions for stream positions int64 [B, T]."""
        if self.config.from_segment_end:
            return torch.arange(position.shape[1] - 1, -1, -1, device=position.device).clamp(
                max=self.config.context - 1
            )
        return position % self.config.context

    def vectors(self, count: int, rule: MemoryRule) -> Tensor:
        """What the terms of all layers share: the row of each distance 0 … count - 1, int64 [count], clamped."""
        return torch.arange(count).clamp(max=count if rule.clamp_len is None else rule.clamp_len)

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        """One layer's terms of the attention scores."""
        return Terms()

    def embed(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        """The input [B, T, D] of a layer, knowing its stream positions int64 [B, T]."""
        return x


class RelativePositions(Positions):
    """W_kR R_d, u and v (Dai et al. 2019, section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        pairs, heads = 1 if config.tie_biases else config.layers, (config.heads, config.head_dim)
        self.u = nn.Parameter(torch.empty(pairs, *heads))
        self.v = nn.Parameter(torch.empty(pairs, *heads))
        self.project = nn.ModuleList(  # W_kR
            nn.Linear(config.d_model, config.heads * config.head_dim, bias=False)
            for _ in range(config.layers)
        )

    def vectors(self, count: int, rule: MemoryRule) -> Tensor:
        """R [count, D]"""
        table = sinusoids(super().vectors(count, rule), self.config.d_model, self.frequencies).to(self.u)
        return F.dropout(table, self.config.dropout, self.training)

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        position = self.project[layer](vectors).unflatten(-1, (self.config.heads, self.config.head_dim))
        pair = 0 if self.config.tie_biases else layer
        return Terms(position=position, u=self.u[pair], v=self.v[pair])


class ShawPositions(Positions):
    """A learned vector and bias for every distance, head and layer (Shaw et al. 2018, as in the public code of Dai et al.)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        L, R, H, K = config.layers, config.context, config.heads, config.head_dim
        self.u = nn.Parameter(torch.empty(L, H, K))
        self.table = nn.Parameter(torch.empty(L, R, H, K))
        self.table_bias = nn.Parameter(torch.zeros(L, R, H))

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        rows = vectors.clamp(max=self.table.shape[1] - 1).to(self.table.device)
        return Terms(position=self.table[layer, rows], bias=self.table_bias[layer, rows], u=self.u[layer])


class LearnedPositions(Positions):
    """One learned table, shared by all heads and layers (Sukhbaatar et al. 2019b, section 5.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = config.heads
        self.table = nn.Parameter(torch.empty(config.context, config.head_dim))

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        rows = vectors.clamp(max=len(self.table) - 1).to(self.table.device)
        return Terms(position=self.table[rows][:, None].expand(-1, self.heads, -1))


class AbsolutePositions(Positions):
    """Sinusoids added to the first layer's input (Vaswani et al. 2017, section 3.5); they start again every `context` tokens."""

    def embed(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        if layer:
            return x
        rows = self.rows(position)
        table = sinusoids(
            torch.arange(int(rows.max()) + 1), x.shape[-1], self.frequencies
        )  # not all of a vast context
        return x + table.to(x)[rows]


class PerLayerPositions(Positions):
    """Learned positions added to every layer's input (Al-Rfou et al. 2018); they start again every `context` tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(config.layers, config.context, config.d_model))

    def embed(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        return x + self.table[layer, self.rows(position)]


def make_positions(config: ModelConfig) -> Positions:
    """The kind that the configuration names."""
    kinds = {
        "relative": RelativePositions, "shaw": ShawPositions, "learned": LearnedPositions,
        "absolute": AbsolutePositions, "per-layer": PerLayerPositions,
    }  # fmt: skip
    return kinds[config.positions](config)
