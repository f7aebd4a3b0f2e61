"""What heads of one memory length see in a step: distances and visibility of every key for every query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Form
from xl_export.graph.ops import Ops


@dataclass(frozen=True)
class Sight:
    """J: key columns; S for the ring, M + T for the other forms.

    mask float [B, 1, T, J]: 0 where the mask rule lets a query see a key, else minus infinity.
    row int64 [B, 1, T, J]: table row of each query and key.
    before bool [B, 1, J, 1]: keys of zero initial memory; None where that is masked instead.
    write_at int64 [B]: first ring slot to write; None for the other forms.
    """

    op: Ops
    batch: ir.Value
    mask: ir.Value
    row: ir.Value
    before: ir.Value | None
    write_at: ir.Value | None
    rows: dict[int, ir.Value] = field(default_factory=dict)

    def row_of(self, heads: int) -> ir.Value:
        """`row` as int32 [B, heads, T, J], once for all layers."""
        if heads not in self.rows:
            op = self.op
            lead = op.Concat(self.batch, op.constant(np.array([heads, 1, 1])), axis=0)
            self.rows[heads] = op.Expand(op.Cast(self.row, to=ir.DataType.INT32), lead)
        return self.rows[heads]


def make_sight(op: Ops, inputs: Mapping[str, ir.Value], rule: MemoryRule, form: Form, rows: int) -> Sight:
    """The sight of heads that remember `rule.mem_len` tokens: by slot in the ring, by column otherwise. rows: of their tables."""
    position = op.Unsqueeze(inputs["position_ids"], op.constant(np.array([1, 3])))  # [B, 1, T, 1]
    length = op.Squeeze(op.Shape(inputs["input_ids"], start=1))
    offset = op.Unsqueeze(_range(op, length), op.constant(np.array([1])))  # [T, 1]
    first = op.Gather(inputs["position_ids"], op.constant(np.array(0)), axis=1)  # [B]
    write_at = None
    if form == "ring":
        slots = op.constant(np.array(rule.slots))
        write_at = op.Mod(first, slots)
        distance = op.Mod(op.Sub(position, op.constant(np.arange(rule.slots))), slots)  # [B, 1, T, S]
    else:
        column = _range(op, op.Add(length, op.constant(np.array(rule.mem_len))))
        ahead = op.Sub(op.Add(offset, op.constant(np.array(rule.mem_len))), column)  # M + i - j, [T, M + T]
        distance = op.Unsqueeze(ahead, op.constant(np.array([0, 1])))
    row = op.Clip(distance, op.constant(np.array(0)), op.constant(np.array(rows - 1)))
    visible = _visible(op, rule, distance, position, offset)
    mask = op.Where(visible, op.constant(np.float32(0)), op.constant(np.float32(-np.inf)))
    return Sight(op, op.Shape(first), mask, row, _before(op, rule, distance, position), write_at)


def _visible(op: Ops, rule: MemoryRule, distance: ir.Value, position: ir.Value, offset: ir.Value) -> ir.Value:
    """`MemoryRule.visible` in graph form."""
    zero, window = op.constant(np.array(0)), op.constant(np.array(rule.mem_len))
    if rule.mask == "full":
        window = op.Add(window, offset)
    seen = op.And(
        op.GreaterOrEqual(distance, op.constant(np.array(rule.nearest))), op.LessOrEqual(distance, window)
    )
    if rule.initial_memory == "masked":
        seen = op.And(seen, op.LessOrEqual(distance, op.Max(position, zero)))
    return seen


def _before(op: Ops, rule: MemoryRule, distance: ir.Value, position: ir.Value) -> ir.Value | None:
    """Keys [B, 1, J, 1] that lie before their text began: further from the last token than its position."""
    if rule.initial_memory == "masked":
        return None
    last, end, axis = (op.constant(np.array([at])) for at in (-1, np.iinfo(np.int64).max, 2))
    nearest, latest = (op.Slice(x, last, end, axis) for x in (distance, position))
    return op.Transpose(op.Greater(nearest, latest), perm=[0, 1, 3, 2])


def _range(op: Ops, count: ir.Value) -> ir.Value:
    return op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
