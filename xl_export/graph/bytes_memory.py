"""Memory in int8, in standard operators: each key or value of a head has a float32 scale of its own.

The scale of a vector x is max |x| / 127, and its bytes are round(x / scale), of two that are equally near the
even one. A vector of zeros has the scale 0. What is not finite in x makes the scale not finite, so that it is
not lost in the bytes. `trainer.model.projected.through_bytes` says the same in PyTorch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from xl_export.graph.ops import Ops

MOST = np.float32(127)  # the largest byte; -128 is not used


def bytes_and_scales(op: Ops, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns vectors x [B, h, T, K] as int8, and their scales float32 [B, h, T, 1]."""
    last, most = op.constant(np.array([3])), op.constant(MOST)
    zero, one = op.constant(np.float32(0)), op.constant(np.float32(1))
    largest = op.ReduceMax(op.Abs(x), last)
    # A maximum may pass over NaN, and a sum does not: 0 times it is 0 for finite numbers, and NaN otherwise.
    scale = op.Add(op.Div(largest, most), op.Mul(op.ReduceSum(x, last), zero))
    divisor = op.Where(op.Equal(scale, zero), one, scale)
    # A scale below the normal numbers has few bits, and a quotient may then be larger than 127.
    rounded = op.Clip(op.Round(op.Div(x, divisor)), op.constant(-MOST), most)
    return op.Cast(rounded, to=int(ir.DataType.INT8)), scale


def widened(op: Ops, stored: ir.Value, scales: ir.Value) -> ir.Value:
    """Returns the vectors [B, h, S, K] in float32, of bytes and their scales [B, h, S, 1]."""
    return op.Mul(op.Cast(stored, to=int(ir.DataType.FLOAT)), scales)
