"""The step graph of fixed sizes, for phones and for runtimes that compile a graph for the sizes it has.

`shift` memory moves with every step, so a key has the same distance from a query in all steps. All that
depends on distances is therefore a constant, and only the mask depends on positions.

| in the other graphs | here |
|---|---|
| Attention | MatMul, Add, Softmax, MatMul |
| scores of positions gathered by distance | tables in the order of the keys; the relative shift |
| comparisons of integers, Where | differences of floats, cut off by Clip |
| Shape, Range, Expand | constants |
| minus infinity | `HIDDEN` |

The relative shift (Dai et al. 2019, Appendix B), a Reshape and a Slice, is only for several tokens. All
operators are of opset 17 or older, which converters have known for years. ONNX Runtime runs the graph too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec
from trainer.model.config import ModelConfig
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.persistent import attend_in_products
from xl_export.graph.step import StepGraph, Terms
from xl_export.graph.visibility import KeyMask

OPSET = 17  # the oldest with LayerNormalization
# What is added to the scores of keys that are not visible. The softmax of such a score is 0 in float32, and
# two of them still have a sum in float16, in which accelerators compute.
HIDDEN = np.float32(-30_000)


@dataclass(frozen=True, kw_only=True)
class FixedMask(KeyMask):
    """The mask of a step in floats; `before_start` is float, 0 for keys from before the stream began."""

    sees: ir.Value | None  # float [B, 1, T, 1], 1 where a query sees any key; None if all do


class FixedStep(StepGraph):
    """The step of a fixed number of rows and tokens."""

    def __init__(self, spec: Spec, config: ModelConfig, weights: Weights, tokens: int | None = None) -> None:
        super().__init__(spec, config, weights, tokens)
        assert spec.fixed_rows is not None, "the rows are fixed"
        self.B = spec.fixed_rows
        self.T = tokens or spec.rule.segment

    def scores(self, query: ir.Value, key: ir.Value) -> ir.Value:
        if self.T > 1:
            return super().scores(query, key)
        # Transposes the one query, not the memory.
        op, swapped = self.op, [0, 1, 3, 2]
        return op.Transpose(op.MatMul(key, op.Transpose(query, perm=swapped)), perm=swapped)

    def split_heads(self, x: ir.Value) -> ir.Value:
        op = self.op
        if self.T == 1:  # nothing changes places
            return op.Reshape(x, op.constant(np.array([self.B, -1, 1, self.config.head_dim])))
        heads = op.Reshape(x, op.constant(np.array([self.B, self.T, -1, self.config.head_dim])))
        return op.Transpose(heads, perm=[0, 2, 1, 3])

    def join_heads(self, x: ir.Value) -> ir.Value:
        op = self.op
        x = x if self.T == 1 else op.Transpose(x, perm=[0, 2, 1, 3])
        return op.Reshape(x, op.constant(np.array([self.B, self.T, -1])))

    def last_of(self, x: ir.Value, count: int, *, axis: int) -> ir.Value:
        first, end, axes = (self.op.constant(np.array([at])) for at in (self.T, self.T + count, axis))
        return self.op.Slice(x, first, end, axes)

    def from_end(self, most: int) -> ir.Value:
        return self.op.constant(np.minimum(np.arange(self.T)[::-1], most))

    @functools.cached_property
    def position(self) -> ir.Value:
        """The position of each token, float [B, 1, T, 1]. Only small ones are compared, and are exact."""
        op = self.op
        numbers = op.Cast(self.inputs["position_ids"], to=int(ir.DataType.FLOAT))
        return op.Reshape(numbers, op.constant(np.array([self.B, 1, self.T, 1])))

    def new_mask(self, rule: MemoryRule) -> FixedMask:
        op = self.op
        zero, one = (op.constant(np.float32(x)) for x in (0, 1))
        distance = self.distance(rule)
        in_window = rule.visible(distance, np.inf, np.arange(self.T)[:, None])
        if rule.initial_memory == "zeros":
            mask = op.constant(np.where(in_window, np.float32(0), HIDDEN)[None, None])
            last = self.position
            if self.T > 1:
                begin, end, axis = (op.constant(np.array([at])) for at in (self.T - 1, self.T, 2))
                last = op.Slice(last, begin, end, axis)
            beyond = op.constant((distance[-1] - 1).astype(np.float32)[:, None])  # [J, 1]
            return FixedMask(mask=mask, before_start=op.Clip(op.Sub(last, beyond), zero, one), sees=None)
        position = self.position
        if not in_window.all():  # in float16, a large position would be infinite, as far as any key
            far = rule.mem_len + self.T  # beyond every key
            distance = np.where(in_window, distance, 2 * far)
            position = op.Clip(position, op.constant(np.float32(-1)), op.constant(np.float32(far)))
        reach = op.constant(distance.astype(np.float32))  # [T, J]
        short = op.Clip(op.Sub(position, reach), op.constant(np.float32(-1)), zero)
        mask = op.Mul(short, op.constant(-HIDDEN))
        # Without itself, the first token of a text sees nothing.
        sees = op.Clip(self.position, zero, one) if rule.nearest else None
        return FixedMask(mask=mask, before_start=None, sees=sees)

    def distance(self, rule: MemoryRule) -> np.ndarray:
        """The distance [T, J] of each query from each key of memory and segment; negative for later keys."""
        return rule.mem_len + np.arange(self.T)[:, None] - np.arange(rule.mem_len + self.T)

    def distance_scores(self, group: Group, query: ir.Value, terms: Terms) -> ir.Value | None:
        op = self.op
        bias = None if terms["bias_table"] is None else self.by_key(group, terms, "bias_table", query)
        table = terms["position_table"]
        if table is None:
            return bias
        T, J = self.T, group.rule.mem_len + self.T
        # Columns are for distances J - 1, …, 0. With one more column, the row of each query begins one place
        # further right than the row of the query after it.
        columns = table[..., np.minimum(np.arange(J)[::-1], table.shape[-1] - 1)]
        if T > 1:
            columns = np.pad(columns, [(0, 0), (0, 0), (1, 0)])
        v = self.named_constant(group, terms["v"], "v")
        scores = op.MatMul(
            query if v is None else op.Add(query, v),
            self.named_constant(group, np.ascontiguousarray(columns), "position_table"),
        )
        if T > 1:
            lead = [self.B, len(group.heads)]
            flat = op.Reshape(scores, op.constant(np.array([*lead, T * (J + 1)])))
            begin, end, axis = (op.constant(np.array([at])) for at in (T, T * (J + 1), 2))
            scores = op.Reshape(op.Slice(flat, begin, end, axis), op.constant(np.array([*lead, T, J])))
        return scores if bias is None else op.Add(scores, bias)

    def by_key(self, group: Group, terms: Terms, kind: str, query: ir.Value) -> ir.Value:
        table = terms[kind]
        assert table is not None, "the caller has seen it"
        row = np.clip(self.distance(group.rule), 0, table.shape[-1] - 1)
        by_key = np.maximum(table[:, 0][:, row][None], HIDDEN)
        return self.op.constant(by_key, f"blocks.{group.name}.{kind}")

    def begun(self, group: Group, kind: str, kept: ir.Value) -> ir.Value:
        op = self.op
        begun = self.mask_of(group).before_start
        if begun is None:
            return kept
        kept = op.Mul(kept, begun)
        initial = self.initial(group, kind)
        if not initial.any():
            return kept
        return op.Add(kept, op.Mul(op.Sub(op.constant(np.float32(1)), begun), op.constant(initial)))

    def attend(
        self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value
    ) -> ir.Value:
        mask = self.mask_of(group)
        assert isinstance(mask, FixedMask)
        return attend_in_products(self, key, value, content=query, bias=bias, sees=mask.sees)
