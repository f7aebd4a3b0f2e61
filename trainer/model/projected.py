"""The model with a memory of keys and values, in place of hidden states.

The keys and values of a token are computed only once. This form is for inference: it has no dropout and no
gradients. `LanguageModel.layers` computes the same answers from remembered hidden states, which it projects
again in every segment. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from runtimes.contract.rule import MemoryRule
from trainer.model.attention import Terms
from trainer.model.model import Block, LanguageModel, Visibility, visibility_of


class ProjectedModel:
    """A model under one rule; its terms for all distances are computed when it is made.

    around: returns the context in which a block computes, for example to gather its weights first.
    write: see `projected_block`; None is `append`.
    """

    def __init__(
        self,
        model: LanguageModel,
        rule: MemoryRule,
        *,
        around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
        write: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.rule = rule
        self.around = around
        self.write = write or append
        with torch.no_grad():
            vectors = model.positions.vectors(rule.slots, rule)
            self.terms = [model.positions.terms(layer, vectors) for layer in range(len(model.blocks))]

    def start(self, batch: int) -> list[Tensor]:
        """The memory of new streams, zeros of 2 L arrays [B, H, M, K]."""
        config = self.model.config
        shape = (batch, config.heads, self.rule.mem_len, config.head_dim)
        return [self.model.vocabulary.table["0"].new_zeros(shape) for _ in range(2 * config.layers)]

    def step(self, tokens: Tensor, memory: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the last layer's output [B, T, D], and the memory after the segment.

        tokens int64 [B, T]. positions int64 [B]: the stream position of each row's first token. memory: the
        keys and values of one layer after the other, 2 L arrays [B, H, M, K].
        """
        T = tokens.shape[1]
        with torch.no_grad():
            visibility = visibility_of(T, positions, self.rule)
            x = self.model.embed(tokens)
            after = []
            for layer, block in enumerate(self.model.blocks):
                x = self.model.positions.embed(layer, x, visibility.positions)
                past = memory[2 * layer : 2 * layer + 2]
                assert isinstance(block, Block)
                terms = nearest_terms(self.terms[layer], self.rule.mem_len + T)
                with self.around(block):
                    x, kept = projected_block(block, x, past, terms, visibility, self.write)
                after += [array[:, :, T:] for array in kept]
            return self.model.last([x]), after


def append(past: Tensor, new: Tensor) -> Tensor:
    """Keys or values [B, H, M + T, K] of memory and segment, one after the other."""
    return torch.cat([past, new], dim=2)


def append_in_bytes(past: Tensor, new: Tensor) -> Tensor:
    """The same with memory in int8: naive, and what every implementation of such memory is compared with."""
    return append(past, through_bytes(new))


def through_bytes(x: Tensor) -> Tensor:
    """Vectors [..., K] as memory in int8 gives them back; the scale of each makes its largest value 127.

    Rounding is to the nearest integer, and to the even one of two that are equally near.
    """
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / torch.where(scale == 0, 1, scale)).round().clamp(-127, 127) * scale


def projected_block(
    block: Block,
    x: Tensor,
    past: list[Tensor],
    terms: Terms,
    visibility: Visibility,
    write: Callable[[Tensor, Tensor], Tensor] = append,
) -> tuple[Tensor, list[Tensor]]:
    """Returns the output of `Block.forward`, and the keys and values [B, h, J, K] of memory and segment.

    past: the keys and values [B, h, M, K] of the memory, of the first h heads; the others attend to no
    context. write: joins the segment's own keys or values [B, h, T, K] to the memory's.
    """
    config = block.config
    normal = block.attention_norm(x) if config.pre_norm else x
    query = block.query(normal if config.query_norm else x).unflatten(-1, (config.heads, config.head_dim))
    read = []  # keys and values [B, J, h, K]
    kept = []
    for project, held in ((block.key, past[0]), (block.value, past[1])):
        width = held.shape[1] * config.head_dim
        own = project(normal)[..., :width].unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        kept.append(write(held, own))
        joined = kept[-1].transpose(1, 2)
        if visibility.before_start is not None:  # the projection of a hidden state of zero
            zero = torch.zeros_like(x[:1, :1])
            zero = block.attention_norm(zero) if config.pre_norm else zero
            initial = project(zero)[..., :width].unflatten(-1, (-1, config.head_dim))
            joined = torch.where(visibility.before_start[:, :, None, None], initial, joined)
        read.append(joined)
    key, value = read
    return block.rest(x, block.attend(query, key, value, terms, visibility)), kept


def nearest_terms(terms: Terms, count: int) -> Terms:
    """Returns the terms of the distances 0 … count - 1."""
    position = None if terms.position is None else terms.position[:count]
    bias = None if terms.bias is None else terms.bias[:count]
    return replace(terms, position=position, bias=bias)
