"""The step graph for onnxruntime-web's WebGPU provider: operators of opset 21 that it computes on the GPU.

| in the other graphs | here |
|---|---|
| TensorScatter | a product with one-hot rows, and Where: the new ring is another tensor |
| Attention | MatMul, Add, Softmax, MatMul |
| distances as integers | floats, which hold small integers exactly: WebGPU has no integers of 64 bits |
| minus infinity | -2^100: shaders may assume that there are no infinities |
| NonZero, ScatterElements | logits of all targets, as in graphs for engines |

Positions stay integers of 64 bits until they are taken modulo the ring, or cut off at its size. ONNX Runtime
runs the graph on its CPU provider too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from xl_export.graph.head import selected_densely
from xl_export.graph.memory import Group
from xl_export.graph.ops import Ops
from xl_export.graph.persistent import LEAST_SCORE, attend_in_products
from xl_export.graph.step import StepGraph, Terms
from xl_export.graph.visibility import StepMask, before_start, visible

OPSET = 21
LAST_AXIS = np.array([3])


@dataclass(frozen=True, kw_only=True)
class WebMask(StepMask):
    """The mask of a step in floats; `mask` has `LEAST_SCORE` where a query does not see a key."""

    one_hot: ir.Value | None = None  # float [B, 1, S, T], 1 where a token is written to a slot
    written: ir.Value | None = None  # bool [B, 1, S, 1], whether a slot is written
    sees: ir.Value | None = None  # float [B, 1, T, 1], 1 where a query sees any key; None if all do


class WebStep(StepGraph):
    """The step whose memory and attention are products; its tensors mean the same as in other steps."""

    def new_mask(self, rule: MemoryRule) -> WebMask:
        return make_mask(self.op, self.inputs, rule, self.terms.rows(rule), circular=self.spec.circular)

    def selected(self, x: ir.Value) -> list[ir.Value]:
        return list(selected_densely(self, x, self.inputs["targets"], self.inputs["logit_rows"]))

    def write_ring(self, group: Group, past: ir.Value, new: ir.Value) -> ir.Value:
        """The ring after the step: a slot keeps its vector, or gets the vector of the token written to it."""
        op = self.op
        mask = self.mask_of(group)
        assert isinstance(mask, WebMask)
        assert mask.one_hot is not None, "the mask of a ring says what is written where"
        placed = op.MatMul(mask.one_hot, self.from_memory(new))
        return op.Where(mask.written, self.to_memory(placed), past)

    def terms_of(self, group: Group) -> Terms:
        terms = super().terms_of(group)
        bias = terms["bias_table"]
        return terms | {"bias_table": None if bias is None else np.maximum(bias, LEAST_SCORE)}

    def attend(
        self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value
    ) -> ir.Value:
        mask = self.mask_of(group)
        assert isinstance(mask, WebMask)
        return attend_in_products(self, key, value, content=query, bias=bias, sees=mask.sees)


def make_mask(
    op: Ops, inputs: Mapping[str, ir.Value], rule: MemoryRule, rows: int, *, circular: bool
) -> WebMask:
    """The mask of heads that remember `rule.mem_len` tokens, as `visibility.make_mask` returns it."""
    first = op.Gather(inputs["position_ids"], op.constant(np.array(0)), axis=1)
    length = op.Squeeze(op.Shape(inputs["input_ids"], start=1))
    offset = op.Unsqueeze(_counted(op, length), op.constant(np.array([1])))  # [T, 1]
    # No distance exceeds the slots, so a position beyond them says the same as their number.
    clipped = op.Clip(inputs["position_ids"], op.constant(np.array(-1)), op.constant(np.array(rule.slots)))
    position = _column(op, clipped)  # [B, 1, T, 1]
    zero, one = (op.constant(np.float32(x)) for x in (0, 1))
    one_hot = written = None
    if circular:
        size = op.constant(np.float32(rule.slots))
        places = np.arange(rule.slots, dtype=np.float32)
        slot = _column(op, op.Mod(inputs["position_ids"], op.constant(np.array(rule.slots))))
        difference = op.Sub(slot, op.constant(places))  # [B, 1, T, S]
        distance = op.Where(op.Less(difference, zero), op.Add(difference, size), difference)
        here = op.Equal(op.constant(places[:, None]), op.Transpose(slot, perm=[0, 1, 3, 2]))  # [B, 1, S, T]
        one_hot = op.Where(here, one, zero)
        written = op.Greater(op.ReduceMax(one_hot, op.constant(LAST_AXIS)), zero)
    else:
        memory = op.constant(np.array(rule.mem_len))
        difference = op.Sub(
            op.Add(offset, op.constant(np.float32(rule.mem_len))), _counted(op, op.Add(length, memory))
        )
        distance = op.Unsqueeze(difference, op.constant(np.array([0, 1])))
    row = op.Clip(distance, zero, op.constant(np.float32(rows - 1)))
    seen = visible(op, rule, distance, position, offset, np.float32)
    sees = None
    if rule.initial_memory == "masked" and rule.nearest:
        sees = op.ReduceMax(op.Where(seen, one, zero), op.constant(LAST_AXIS))
    before = before_start(op, rule, distance, position)
    mask = op.Where(seen, zero, op.constant(LEAST_SCORE))
    return WebMask(
        mask=mask,
        before_start=before,
        op=op,
        batch=op.Shape(first),
        row=row,
        one_hot=one_hot,
        written=written,
        sees=sees,
    )


def _counted(op: Ops, count: ir.Value) -> ir.Value:
    """0, 1, … as floats."""
    return op.Cast(op.Range(op.constant(np.array(0)), count, op.constant(np.array(1))), to=ir.DataType.FLOAT)


def _column(op: Ops, integers: ir.Value) -> ir.Value:
    """Integers [B, T] as floats [B, 1, T, 1]."""
    return op.Unsqueeze(op.Cast(integers, to=ir.DataType.FLOAT), op.constant(np.array([1, 3])))
