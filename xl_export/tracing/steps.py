"""The models of this project as modules that can be traced, in each form of memory.

`hidden` and `shift` run the layers with which PyTorch trains and scores. `ring` runs the same layers over the
slots of a ring, with attention by distance. Terms by distance are constants after training, so they are
buffers here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORM_FACTS, Form, state_tensors
from trainer.model.attention import Terms
from trainer.model.model import Block, LanguageModel, Visibility, visibility_of
from trainer.model.projected import nearest_terms, projected_block
from trainer.model.span import AdaptiveSpan
from xl_export.tracing.graph import longest_traced
from xl_export.tracing.module import Sizes
from xl_export.tracing.ring import ring_distances, ring_write

TERMS = ("position", "bias", "u", "v")


class OwnStep(nn.Module):
    """A `LanguageModel` with the interface of `xl_export.tracing.module.StepModule`, under one rule."""

    def __init__(self, model: LanguageModel, rule: MemoryRule, form: Form) -> None:
        super().__init__()
        self.rule = rule
        self._facts = FORM_FACTS[form]
        self.config = model.config
        facts = dataclasses.replace(model.facts(), reaches=())  # a traced head has the whole memory
        self.sizes = Sizes(
            vocab_size=facts.vocab_size,
            layers=facts.layers,
            d_model=facts.d_model,
            heads=facts.heads,
            head_dim=facts.head_dim,
            d_ff=facts.d_ff,
        )
        self._states = state_tensors(facts, rule, form)
        # Children have the names of the model's own, so that the graph's constants have them too.
        self.vocabulary = model.vocabulary
        self._rows = model.positions.input_rows
        self.blocks = nn.ModuleList(
            _with_fixed_span(block, dataclasses.replace(rule, segment=longest_traced(rule)))
            for block in model.blocks
        )
        with torch.no_grad():
            # Tables for the longest segment that is traced: a rule of two tokens is traced with more.
            wide = dataclasses.replace(rule, segment=longest_traced(rule))
            rows = wide.slots
            if self._facts.circular:  # a gate has one row for each slot, and is added to the other terms
                rows = rule.slots if model.spans() else model.positions.table_rows(wide)
            vectors = model.positions.vectors(rows, wide)
            for layer in range(len(self.blocks)):
                terms = model.positions.terms(layer, vectors)
                for name in TERMS:
                    tensor = getattr(terms, name)
                    self.register_buffer(f"terms_{layer}_{name}", None if tensor is None else tensor.detach())
                table = model.positions.input_table(layer)
                table = None if table is None else table.detach().to(next(model.parameters()).dtype)
                self.register_buffer(f"input_table_{layer}", table)

    def start(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch, *state.row) for state in self._states)

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        T = tokens.shape[1]
        M = self.rule.mem_len
        visibility = (
            self._ring_visibility(positions)
            if self._facts.circular
            else visibility_of(T, positions[:, 0], self.rule)
        )
        x = self.vocabulary.embed(tokens)
        after = []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            table = getattr(self, f"input_table_{layer}")
            x = x if table is None else x + table[self._rows(positions)]
            terms = Terms(**{name: getattr(self, f"terms_{layer}_{name}") for name in TERMS})
            if self._facts.holds == "hidden":
                past = memory[layer].to(x.dtype)
                after.append(torch.cat([past, x], dim=1)[:, T:].to(memory[layer].dtype))
                x = block(x, past, nearest_terms(terms, M + T), visibility)
                continue
            pair = list(memory[2 * layer : 2 * layer + 2])
            if self._facts.circular:
                kept: list[Tensor] = []

                def write(ring: Tensor, new: Tensor, kept: list[Tensor] = kept) -> Tensor:
                    kept.append(ring_write(ring, new, positions))
                    return kept[-1].to(new.dtype)

                x, _ = projected_block(block, x, pair, terms, visibility, write)
                after += kept
            else:
                halves = [past.to(x.dtype) for past in pair]
                x, both = projected_block(block, x, halves, nearest_terms(terms, M + T), visibility)
                after += [array[:, :, T:].to(past.dtype) for array, past in zip(both, pair, strict=True)]
        return x, after

    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.logits(hidden)

    def log_prob(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.vocabulary.log_prob(hidden, targets)

    def _ring_visibility(self, positions: Tensor) -> Visibility:
        """What the tokens of a segment see of the S slots after the segment was written."""
        distance = ring_distances(positions, self.rule.slots)
        offset = torch.arange(positions.shape[1])[:, None]
        visible = self.rule.visible(distance, positions[:, :, None], offset)
        before_start = distance[:, -1] > positions[:, -1:] if self.rule.initial_memory == "zeros" else None
        return Visibility(visible, before_start, positions, AttentionByDistance(distance))


class _FixedSpan(nn.Module):
    """What a layer asks of its `AdaptiveSpan`, as constants: a mask by distance and a window."""

    def __init__(self, span: AdaptiveSpan, rule: MemoryRule) -> None:
        super().__init__()
        self.gate: Tensor
        self.span = span.span
        self._window = span.window()
        with torch.no_grad():
            self.register_buffer("gate", span.mask(rule.slots))

    def mask(self, count: int) -> Tensor:
        return self.gate[:count]

    def softmax_window(self) -> int | None:
        return self._window


def _with_fixed_span(block: nn.Module, rule: MemoryRule) -> nn.Module:
    """The block, or one that shares its parameters and has its span as constants."""
    assert isinstance(block, Block)
    if block.span is None:
        return block
    fixed = copy.copy(block)
    fixed._modules = dict(block._modules) | {"span": _FixedSpan(block.span, rule)}
    return fixed


class AttentionByDistance:
    """Attention to keys in any order, with the signature of `trainer.model.attention.relative_attention`.

    distance int64 [B, T, J]: of every query from every key; the slots of a ring have no order that
    `relative_attention` knows. The terms have one row for each distance, and longer ones have the last row.
    """

    def __init__(self, distance: Tensor) -> None:
        self.distance = distance

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms,
        persistent: tuple[Tensor, Tensor] | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        query_BHTK, key_BHJK, value_BHJK = (x.transpose(1, 2) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        content = query_BHTK if terms.u is None else query_BHTK + terms.u[:, None]
        if terms.window is not None:
            visible = visible & (self.distance <= terms.window)
        bias = torch.where(visible, 0.0, float("-inf"))[:, None]
        by_distance = _scores(query_BHTK, terms, scale)
        gate = None if terms.gate is None else terms.gate.T[None, :, None]
        fused = persistent is None and not (gate is not None and terms.epsilon)
        if (
            fused and gate is not None
        ):  # to multiply after the softmax and divide by the sum is to add the logarithm
            by_distance = gate.log() if by_distance is None else by_distance + gate.log()
        if by_distance is not None:
            bias = bias + self._by_key(by_distance, query_BHTK)
        if fused:
            answer = torch.nn.functional.scaled_dot_product_attention(
                content, key_BHJK, value_BHJK, attn_mask=bias.expand(-1, query.shape[2], -1, -1), scale=scale
            )
            return answer.transpose(1, 2)
        gate = None if gate is None else self._by_key(gate, query_BHTK)
        return self._in_parts(
            query_BHTK, content, key_BHJK, value_BHJK, bias, gate, persistent, terms.epsilon
        )

    def _in_parts(
        self,
        query: Tensor,
        content: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        gate: Tensor | None,
        persistent: tuple[Tensor, Tensor] | None,
        epsilon: float,
    ) -> Tensor:
        """Attention whose weights are needed by themselves: for persistent vectors, and for an epsilon."""
        J = key.shape[2]
        scale = query.shape[-1] ** -0.5
        scores = content @ key.transpose(-1, -2) * scale + bias
        if persistent is None:  # a row without visible keys has weights of zero
            blind = (bias == float("-inf")).all(dim=-1, keepdim=True)
            context = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
            rest = None  # an empty slice is not traced as one
        else:
            own = query @ persistent[0].transpose(-1, -2) * scale
            weights = torch.cat([scores, own], dim=-1).softmax(dim=-1)
            context = weights[..., :J]
            rest = weights[..., J:]
        if gate is not None:
            context = context * gate
            total = context.sum(dim=-1, keepdim=True) + epsilon
            if rest is not None:
                total = total + rest.sum(dim=-1, keepdim=True)
            total = torch.where(total > 0, total, 1.0)
            context = context / total
            rest = None if rest is None else rest / total
        answer: Tensor = context @ value
        if persistent is not None and rest is not None:
            answer = answer + rest @ persistent[1]
        return answer.transpose(1, 2)

    def _by_key(self, by_distance: Tensor, query: Tensor) -> Tensor:
        """Values [B, H, T, J] by key, of values [B or 1, H, T or 1, R] by distance."""
        B = query.shape[0]
        H = query.shape[1]
        T = query.shape[2]
        J = self.distance.shape[2]
        row = self.distance.clamp(max=by_distance.shape[3] - 1)[:, None].expand(B, H, T, J)
        return by_distance.expand(B, H, T, -1).gather(3, row)


def _scores(query: Tensor, terms: Terms, scale: float) -> Tensor | None:
    """((q + v)·r(d) + bias(d)) / sqrt(K) [B or 1, H, T or 1, R]; None without terms by distance."""
    bias = None if terms.bias is None else terms.bias.T[None, :, None]
    if terms.position is None:
        return None if bias is None else bias * scale
    shifted = query if terms.v is None else query + terms.v[:, None]
    scores = shifted @ terms.position.permute(1, 2, 0)
    return (scores if bias is None else scores + bias) * scale
