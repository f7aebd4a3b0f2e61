"""The forms of memory in the graph: how keys and values of memory and segment come together.

`ring` and `shift` remember keys and values. The ring is written in place, at the slot of the token's
position; the shift form appends the segment and drops what is oldest. `hidden` is the paper's own form: it
remembers layer inputs, whose keys and values are computed again in each step. A ring may be of bytes, with a
scale for each key and value of a head, which is a memory tensor of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.contract.precision import MemoryType
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import SCALE, HeadGroup
from trainer.model.config import ModelConfig
from trainer.model.terms import ModelTerms
from xl_export.graph.layers import Layers, Weights
from xl_export.graph.ops import TYPES, Ops, graph_input
from xl_export.graph.visibility import KeyMask, StepMask, make_mask

COMPUTED: MemoryType = "float32"  # the type of everything but memory
MAX_BYTE = np.float32(127)  # the largest byte; -128 is not used


@dataclass(frozen=True)
class Group:
    """Some heads of one layer with the memory they share.

    `name` is the prefix of their constants and tensors.
    """

    layer: int
    name: str
    heads: Sequence[int]
    rule: MemoryRule


class MemoryLayers(Layers):
    """Writes a layer's queries, keys and values, and its memory tensors, in the spec's form of memory."""

    def __init__(self, spec: Spec, config: ModelConfig, weights: Weights, tokens: int | None = None) -> None:
        """tokens: as in `Spec.graph_shape`."""
        super().__init__(config, weights)
        self.spec = spec
        self.rule = spec.rule
        self.terms = ModelTerms(config, weights, spec.rule)
        sized_inputs, self.outputs = (
            [dataclasses.replace(fact, shape=spec.graph_shape(fact, tokens)) for fact in facts]
            for facts in (spec.inputs, spec.outputs)
        )
        self.inputs = {fact.name: graph_input(fact) for fact in sized_inputs}
        self.masks: dict[int, KeyMask] = {}

    def with_rules(self, layer: int, groups: Sequence[HeadGroup]) -> list[Group]:
        """The layer's groups of heads with their rules."""
        return [
            Group(layer, group.name, group.heads, dataclasses.replace(self.rule, mem_len=group.mem_len))
            for group in groups
        ]

    def mask_of(self, group: Group) -> KeyMask:
        """The mask of a group. All groups with the same memory length share it."""
        if group.rule.mem_len not in self.masks:
            self.masks[group.rule.mem_len] = self.new_mask(group.rule)
        return self.masks[group.rule.mem_len]

    def new_mask(self, rule: MemoryRule) -> KeyMask:
        """The mask of heads with this rule, in new nodes."""
        return make_mask(self.op, self.inputs, rule, self.terms.rows(rule), circular=self.spec.circular)

    def from_input(
        self, layer: int, x: ir.Value, order: list[int], others: list[int]
    ) -> tuple[ir.Value, ...]:
        """Returns queries [B, H, T, K] of all heads, and keys and values of the heads in `order`.

        The keys and values belong to the segment.
        """
        packed = self.projected(layer, x, order, others)
        pieces = [
            y for x, widths in packed for y in (self.op.split(x, widths, axis=2) if len(widths) > 1 else [x])
        ]
        return tuple(self.split_heads(piece) for piece in pieces)

    def projected(
        self, layer: int, x: ir.Value, order: list[int], others: list[int]
    ) -> list[tuple[ir.Value, list[int]]]:
        """Returns queries, keys and values in as few products as possible, with the widths of the parts."""
        op = self.op
        query_input = x
        name = f"blocks.{layer}."
        if self.config.pre_norm:
            x = self.norm(name + "attention_norm", x)
        matrices = self.projections(layer, order, others)
        widths = [matrix.shape[1] for matrix in matrices]
        if self.config.pre_norm and not self.config.query_norm:
            query = op.MatMul(query_input, op.constant(matrices.pop(0), name + "query"))
            packed = op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "key_value"))
            return [(query, widths[:1]), (packed, widths[1:])]
        return [
            (op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "query_key_value")), widths)
        ]

    def projections(self, layer: int, order: list[int], others: list[int]) -> list[np.ndarray]:
        """The weights [D, …] of the queries of all heads, and of the keys and values of heads in `order`."""
        return [
            self.projection(layer, "query", [*order, *others]),
            *(self.projection(layer, kind, order) for kind in ("key", "value")),
        ]

    def from_hidden(
        self, group: Group, x: ir.Value, order: list[int], others: list[int], present: list[ir.Value]
    ) -> tuple[ir.Value, ...]:
        """Queries, and keys and values of memory and segment, from remembered layer inputs [B, M, D].

        Appends the memory after the step to `present`.
        """
        op = self.op
        name = f"blocks.{group.layer}."
        context = op.Concat(self.inputs[f"past_hidden.{group.layer}"], self.to_memory(x), axis=1)
        present.append(self.last_of(context, group.rule.mem_len, axis=1))
        context = self.from_memory(context)
        if (before_start := self.mask_of(group).before_start) is not None:
            before_start = op.Squeeze(before_start, op.constant(np.array([1])))
            context = op.Where(before_start, op.constant(np.float32(0)), context)
        if self.config.pre_norm:
            context = self.norm(name + "attention_norm", context)
            x = self.norm(name + "attention_norm", x) if self.config.query_norm else x
        matrices = [self.projection(group.layer, kind, order) for kind in ("key", "value")]
        packed = op.MatMul(context, op.constant(np.concatenate(matrices, axis=1), name + "key_value"))
        query = op.MatMul(
            x, op.constant(self.projection(group.layer, "query", [*order, *others]), name + "query")
        )
        return tuple(
            self.split_heads(y) for y in (query, *op.split(packed, [m.shape[1] for m in matrices], axis=2))
        )

    def remembered(self, group: Group, kind: str, new: ir.Value, present: list[ir.Value]) -> ir.Value:
        """Returns keys or values [B, h, J, K] of memory and segment.

        It appends the memory after the step to `present`.
        """
        op = self.op
        name = f"past_key_values.{group.name}.{kind}"
        past = self.inputs[name]
        if self.spec.scaled_memory:
            stored = bytes_and_scales(op, new)
            pasts = past, self.inputs[name + SCALE]
            pair = [self.write_ring(group, *sides) for sides in zip(pasts, stored, strict=True)]
            present += pair
            kept = widened(op, *pair)
        elif self.spec.circular:
            written = self.write_ring(group, past, self.to_memory(new))
            present.append(written)
            kept = self.from_memory(written)
        else:
            context = op.Concat(past, self.to_memory(new), axis=2)
            present.append(self.last_of(context, group.rule.mem_len, axis=2))
            kept = self.from_memory(context)
        return self.begun(group, kind, kept)

    def begun(self, group: Group, kind: str, kept: ir.Value) -> ir.Value:
        """Keys or values [B, h, J, K], in which those from before the stream began are of hidden states of
        zero if the mask does not hide them.
        """
        op = self.op
        before_start = self.mask_of(group).before_start
        return (
            kept
            if before_start is None
            else op.Where(before_start, op.constant(self.initial(group, kind)), kept)
        )

    def write_ring(self, group: Group, past: ir.Value, new: ir.Value) -> ir.Value:
        """The ring [B, h, S, K] after the step, with the segment's vectors [B, h, T, K] in their slots."""
        mode = "linear" if self.spec.linear_ring else "circular"
        return self.op.TensorScatter(past, new, self.write_at(group), axis=2, mode=mode)

    def write_at(self, group: Group) -> ir.Value:
        """The first slot of a group's ring to write, int64 [B]."""
        mask = self.mask_of(group)
        assert isinstance(mask, StepMask), "only graphs whose sizes vary have rings"
        assert mask.write_at is not None, "the mask of a ring has the slots"
        return mask.write_at

    def to_memory(self, x: ir.Value) -> ir.Value:
        """x in the type of the memory tensors."""
        dtype = self.spec.state_dtype
        return x if dtype == COMPUTED else self.op.Cast(x, to=int(TYPES[dtype]))

    def from_memory(self, x: ir.Value) -> ir.Value:
        """A memory tensor in the type of all computation."""
        return x if self.spec.state_dtype == COMPUTED else self.op.Cast(x, to=int(TYPES[COMPUTED]))

    def initial(self, group: Group, kind: str) -> np.ndarray:
        """The key or value [h, 1, K] of a hidden state of zero: zero, or W·beta behind a LayerNorm."""
        beta = self.weights[f"blocks.{group.layer}.attention_norm.bias"]
        hidden = beta if self.config.pre_norm else np.zeros_like(beta)
        return (hidden @ self.projection(group.layer, kind, group.heads)).reshape(
            len(group.heads), 1, self.config.head_dim
        )

    def last_of(self, x: ir.Value, count: int, *, axis: int) -> ir.Value:
        """The last `count` entries along an axis."""
        op = self.op
        size = op.Shape(x, start=axis, end=axis + 1)
        return op.Slice(x, op.Sub(size, op.constant(np.array([count]))), size, op.constant(np.array([axis])))


def bytes_and_scales(op: Ops, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns vectors x [B, h, T, K] as int8, and their scales float32 [B, h, T, 1].

    The scale of a vector is max |x| / 127, and its bytes are round(x / scale), of two that are equally near
    the even one. What is not finite makes the scale not a number, so that it is not lost in the bytes.
    `trainer.model.projected.through_bytes` says the same in PyTorch.
    """
    last = op.constant(np.array([3]))
    most = op.constant(MAX_BYTE)
    zero = op.constant(np.float32(0))
    one = op.constant(np.float32(1))
    largest = op.ReduceMax(op.Abs(x), last)
    # A maximum may pass over NaN, and a sum does not. The zeros are summed, because a sum of large finite
    # numbers may be infinite; 0 times a number that is not finite is NaN.
    scale = op.Add(op.Div(largest, most), op.ReduceSum(op.Mul(x, zero), last))
    divisor = op.Where(op.Equal(scale, zero), one, scale)
    # A scale below the normal numbers has few bits, and a quotient may then be larger than 127.
    rounded = op.Clip(op.Round(op.Div(x, divisor)), op.constant(-MAX_BYTE), most)
    return op.Cast(rounded, to=int(ir.DataType.INT8)), scale


def widened(op: Ops, stored: ir.Value, scales: ir.Value) -> ir.Value:
    """Returns the vectors [B, h, S, K] in float32, of bytes and their scales [B, h, S, 1]."""
    return op.Mul(op.Cast(stored, to=int(ir.DataType.FLOAT)), scales)
