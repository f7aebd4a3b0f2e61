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

from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import Form, state_tensors
from trainer.model.attention import Terms
from trainer.model.model import Block, LanguageModel, Visibility, visibility_of
from trainer.model.projected import nearest_terms, projected_block
from trainer.model.span import AdaptiveSpan
from xl_export.tracing.graph import longest_traced
from xl_export.tracing.module import Sizes
from xl_export.tracing.ring import AttentionByDistance, ring_distances, ring_write

TERMS = ("position", "bias", "u", "v")


def traced_facts(model: LanguageModel) -> ModelFacts:
    """The facts of a model whose step is traced: every head has the whole memory, whatever its span."""
    return dataclasses.replace(model.facts(), reaches=())


class OwnStep(nn.Module):
    """A `LanguageModel` with the interface of `xl_export.tracing.module.StepModule`, under one rule."""

    def __init__(self, model: LanguageModel, rule: MemoryRule, form: Form) -> None:
        super().__init__()
        self.rule = rule
        self.form = form
        self.config = model.config
        facts = traced_facts(model)
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
            if form == "ring":  # a gate has one row for each slot, and is added to the other terms
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
            if self.form == "ring"
            else visibility_of(T, positions[:, 0], self.rule)
        )
        x = self.vocabulary.embed(tokens)
        after = []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            table = getattr(self, f"input_table_{layer}")
            x = x if table is None else x + table[self._rows(positions)]
            terms = Terms(**{name: getattr(self, f"terms_{layer}_{name}") for name in TERMS})
            if self.form == "hidden":
                past = memory[layer].to(x.dtype)
                after.append(torch.cat([past, x], dim=1)[:, T:].to(memory[layer].dtype))
                x = block(x, past, nearest_terms(terms, M + T), visibility)
                continue
            pair = list(memory[2 * layer : 2 * layer + 2])
            if self.form == "ring":
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
