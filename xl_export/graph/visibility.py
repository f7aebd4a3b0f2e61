"""The mask of a step in the graph: distances between queries and keys, and which keys are visible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from xl_export.graph.ops import Ops


@dataclass(frozen=True, kw_only=True)
class KeyMask:
    """Values that all heads of one memory length share.

    J key columns: S for the ring, M + T for the other forms.
    """

    mask: ir.Value  # float [B, 1, T, J]: 0 where a query sees a key, minus infinity where it does not
    before_start: ir.Value | None
    """bool [B, 1, J, 1]: keys from before the stream began, which are read as hidden states of zero; None if
    the mask hides them.
    """


@dataclass(frozen=True, kw_only=True)
class StepMask(KeyMask):
    """The mask of a graph whose sizes vary."""

    op: Ops
    batch: ir.Value
    row: ir.Value  # int64 [B, 1, T, J]: the row of the tables by distance for every query and key
    write_at: ir.Value | None = None  # int64 [B]: the ring's first slot to write; None for the other forms
    rows: dict[int, ir.Value] = field(default_factory=dict)

    def row_of(self, heads: int) -> ir.Value:
        """`row` as int32 [B, heads, T, J]. All layers with the same number of heads share the value."""
        if heads not in self.rows:
            op = self.op
            lead = op.Concat(self.batch, op.constant(np.array([heads, 1, 1])), axis=0)
            self.rows[heads] = op.Expand(op.Cast(self.row, to=ir.DataType.INT32), lead)
        return self.rows[heads]


def make_mask(
    op: Ops, inputs: Mapping[str, ir.Value], rule: MemoryRule, rows: int, *, circular: bool
) -> StepMask:
    """The mask of heads that remember `rule.mem_len` tokens, whose tables by distance have `rows` rows.

    Key columns are the slots of the ring, or the memory and the segment one after the other in the other
    forms.
    """
    position = op.Unsqueeze(inputs["position_ids"], op.constant(np.array([1, 3])))  # [B, 1, T, 1]
    length = op.Squeeze(op.Shape(inputs["input_ids"], start=1))
    offset = op.Unsqueeze(_range(op, length), op.constant(np.array([1])))  # [T, 1]
    first = op.Gather(inputs["position_ids"], op.constant(np.array(0)), axis=1)  # [B]
    write_at = None
    if circular:
        # The token of stream position p is in slot p mod S, so the distance follows from the two, modulo S.
        slots = op.constant(np.array(rule.slots))
        write_at = op.Mod(first, slots)
        distance = op.Mod(op.Sub(position, op.constant(np.arange(rule.slots))), slots)  # [B, 1, T, S]
    else:
        # The query of offset i is in column M + i, so its distance from column j is M + i - j in every row.
        column = _range(op, op.Add(length, op.constant(np.array(rule.mem_len))))
        difference = op.Sub(op.Add(offset, op.constant(np.array(rule.mem_len))), column)  # [T, M + T]
        distance = op.Unsqueeze(difference, op.constant(np.array([0, 1])))
    # Distances beyond the tables have the terms of the last row. Negative ones are masked: any row will do.
    row = op.Clip(distance, op.constant(np.array(0)), op.constant(np.array(rows - 1)))
    seen = visible(op, rule, distance, position, offset)
    mask = op.Where(seen, op.constant(np.float32(0)), op.constant(np.float32(-np.inf)))
    return StepMask(
        mask=mask,
        before_start=before_start(op, rule, distance, position),
        op=op,
        batch=op.Shape(first),
        row=row,
        write_at=write_at,
    )


def visible(
    op: Ops,
    rule: MemoryRule,
    distance: ir.Value,
    position: ir.Value,
    offset: ir.Value,
    dtype: type[np.int64 | np.float32] = np.int64,
) -> ir.Value:
    """`MemoryRule.visible` in the graph: bool [B, 1, T, J]. dtype: the type of the three values."""
    zero = op.constant(dtype(0))
    window = op.constant(dtype(rule.mem_len))
    if rule.window_grows:
        window = op.Add(window, offset)
    seen = op.And(
        op.GreaterOrEqual(distance, op.constant(dtype(rule.nearest))), op.LessOrEqual(distance, window)
    )
    if rule.initial_memory == "masked":
        seen = op.And(seen, op.LessOrEqual(distance, op.Max(position, zero)))
    return seen


def before_start(op: Ops, rule: MemoryRule, distance: ir.Value, position: ir.Value) -> ir.Value | None:
    """Returns which keys [B, 1, J, 1] are from before the stream began.

    Their distance from the last token exceeds its position.
    """
    if rule.initial_memory == "masked":
        return None
    last, end, axis = (op.constant(np.array([at])) for at in (-1, np.iinfo(np.int64).max, 2))
    last_distance, last_position = (op.Slice(x, last, end, axis) for x in (distance, position))
    return op.Transpose(op.Greater(last_distance, last_position), perm=[0, 1, 3, 2])


def _range(op: Ops, count: ir.Value) -> ir.Value:
    return op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
