"""Transformer-XL (Dai et al. 2019, sections 3.2 and 3.3), read as the paper writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.rule import MemoryRule
from runtimes.spec import ModelFacts
from trainer.attention import Attention, relative_attention, sinusoids
from trainer.model_config import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # query, key, value, position → heads' answers


class Block(nn.Module):
    """One layer: relative attention over memory and segment, then a position-wise feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        D, width = config.d_model, config.heads * config.head_dim
        self.query = nn.Linear(D, width, bias=False)  # W_q
        self.key = nn.Linear(D, width, bias=False)  # W_kE
        self.value = nn.Linear(D, width, bias=False)  # W_v
        self.position = nn.Linear(D, width, bias=False)  # W_kR
        self.out = nn.Linear(width, D, bias=False)
        self.attention_norm = nn.LayerNorm(D)
        self.expand = nn.Linear(D, config.d_ff)
        self.contract = nn.Linear(config.d_ff, D)
        self.feed_forward_norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, memory: Tensor, before: Tensor | None, table: Tensor, attend: Attend) -> Tensor:
        """x [B, T, D] and memory [B, M, D] → [B, T, D].

        before [B, J]: keys to read as hidden states of zero. table [J, D]: position vectors by distance.
        """
        context = torch.cat([memory.detach(), x], dim=1)  # [SG(m) ∘ h]
        if before is not None:
            context = context.masked_fill(before[:, :, None], 0.0)
        if self.config.pre_norm:
            context = self.attention_norm(context)
            x = x + self._attention(context[:, -x.shape[1] :], context, table, attend)
            return x + self._feed_forward(self.feed_forward_norm(x))
        x = self.attention_norm(x + self._attention(x, context, table, attend))
        x = self.feed_forward_norm(x + self._feed_forward(x))
        return x

    def _attention(self, x: Tensor, context: Tensor, table: Tensor, attend: Attend) -> Tensor:
        heads = (self.config.heads, self.config.head_dim)
        query, position = self.query(x).unflatten(-1, heads), self.position(table).unflatten(-1, heads)
        key, value = self.key(context).unflatten(-1, heads), self.value(context).unflatten(-1, heads)
        return self._dropout(self.out(attend(query, key, value, position).flatten(-2)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._dropout(self.contract(self._dropout(F.relu(self.expand(x)))))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)


@dataclass(frozen=True)
class Loss:
    """objective: the scalar that training descends, penalties included. nats: mean negative log-likelihood of a token."""

    objective: Tensor
    nats: Tensor


class TransformerXL(nn.Module):
    """Language model with segment recurrence; input embedding and output layer share one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        pairs = 1 if config.tie_biases else config.layers
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.output_bias = nn.Parameter(torch.empty(config.vocab_size))
        self.content_bias = nn.Parameter(torch.empty(pairs, config.heads, config.head_dim))  # u
        self.position_bias = nn.Parameter(torch.empty(pairs, config.heads, config.head_dim))  # v
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal(0, 0.02) for every matrix, u and v, as in the public code; zero biases, unit norms."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith(("norm.bias", "expand.bias", "contract.bias", "output_bias")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        memory: list[Tensor],
        positions: Tensor,
        rule: MemoryRule,
        *,
        attention: Attention = relative_attention,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V] of one segment, and the memory after it.

        tokens int64 [B, T]; memory: the last M inputs of each layer, L of [B, M, D]; positions int64 [B]:
        stream position of each row's first token here. Memory from before position 0 is masked, or read
        as zeros, as the rule says; no gradient flows into it.
        """
        T, M = tokens.shape[1], rule.mem_len
        columns = torch.arange(-M, T, device=tokens.device)  # of keys; the queries are the last T
        keys = positions[:, None] + columns  # stream positions [B, J]
        queries = keys[:, M:, None]  # [B, T, 1]
        visible = rule.visible(queries - keys[:, None], queries, columns[M:, None])
        before = (keys < 0) if rule.initial_memory == "zeros" else None
        table = self._dropout(self._position_vectors(M + T, rule))
        x = self._dropout(self.embedding(tokens) * self.config.d_model**0.5)
        weights_dropout = self.config.attention_dropout if self.training else 0.0
        after = []
        for layer, block in enumerate(self.blocks):
            after.append(torch.cat([memory[layer], x], dim=1)[:, T:].detach())
            pair = 0 if self.config.tie_biases else layer
            u, v = self.content_bias[pair], self.position_bias[pair]
            attend = partial(attention, u=u, v=v, visible=visible, dropout=weights_dropout)
            x = block(x, memory[layer], before, table, attend)
        return F.linear(self._dropout(x), self.embedding.weight, self.output_bias), after

    def loss(
        self, tokens: Tensor, targets: Tensor, memory: list[Tensor], positions: Tensor, rule: MemoryRule, *, progress: float
    ) -> tuple[Loss, list[Tensor]]:
        """What one segment costs, and the memory after it. targets int64 [B, T]; progress: share of training done, 0 to 1."""
        logits, after = self(tokens, memory, positions, rule)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return Loss(nats, nats.detach()), after

    def constrain(self) -> None:
        """Puts parameters that an optimiser's step took out of their range back into it."""

    def start(self, batch: int, rule: MemoryRule) -> list[Tensor]:
        """Memory of `batch` new streams; what it holds is never seen while positions are 0, unless as zeros."""
        weight = self.embedding.weight
        return [weight.new_zeros(batch, rule.mem_len, self.config.d_model) for _ in self.blocks]

    def facts(self) -> ModelFacts:
        """The part of the configuration that an artefact carries."""
        c = self.config
        return ModelFacts(
            architecture="transformer-xl", layers=c.layers, heads=c.heads, head_dim=c.head_dim, d_model=c.d_model, d_ff=c.d_ff,
            vocab_size=c.vocab_size, pre_norm=c.pre_norm, tie_biases=c.tie_biases, parameters=c.parameters,
        )  # fmt: skip

    def _position_vectors(self, count: int, rule: MemoryRule) -> Tensor:
        distances = torch.arange(count).clamp(max=rule.clamp_len or count)
        return sinusoids(distances, self.config.d_model).to(self.embedding.weight)

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)
