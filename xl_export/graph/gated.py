"""Writes attention whose weights are masked after the softmax, and divided by their sum plus epsilon.

The public code of adaptive spans has this form (`SpanConfig.epsilon`). Without an epsilon the mask is part of
the scores, as log m(d), and the softmax alone is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from trainer.model.config import ModelConfig
from xl_export.graph.layers import Layers
from xl_export.graph.persistent import persistent_constants

# Replaces minus infinity, so that a query without visible keys is not NaN: its scores are all equal, and its
# weights are multiplied by 0 afterwards. Scores are too small to change it when it is added to them. It is a
# power of two, since runtimes fuse a softmax to 2^(score * c - largest * c): without rounding of the first
# product the difference of equal scores must still be 0, and for -1e30 it is about 1e22.
LEAST_SCORE = np.float32(-(2.0**100))


def gated_attention(
    layers: Layers,
    config: ModelConfig,
    layer: int,
    heads: Sequence[int],
    *,
    query: ir.Value,
    content: ir.Value,
    key: ir.Value,
    value: ir.Value,
    bias: ir.Value,
    gate: ir.Value,
) -> ir.Value:
    """Returns the answers [B, h, T, K] of some heads; a query without visible keys gets zeros.

    query, content: queries without and with u, [B, h, T, K]. key, value: [B, h, J, K]. bias: what is added to
    the scores, [B, h, T, J]. gate: the factors of the weights, [B, h, T, J]; they are 0 for keys that are not
    visible.
    """
    assert config.span is not None
    op = layers.op
    scores = op.Add(
        op.MatMul(content, op.Transpose(key, perm=[0, 1, 3, 2])), op.Max(bias, op.constant(LEAST_SCORE))
    )
    last = op.constant(np.array([3]))
    total = op.constant(np.float32(config.span.epsilon))
    if config.sublayers != "all-attention":
        weights = op.Mul(op.Softmax(scores, axis=-1), gate)
        return op.Div(op.MatMul(weights, value), op.Add(op.ReduceSum(weights, last), total))
    keys, values = persistent_constants(layers, layer, heads)
    count = layers.weights[f"blocks.{layer}.persistent.key"].shape[1]
    joint = op.Softmax(op.Concat(op.MatMul(query, keys), scores, axis=3), axis=-1)
    start = op.constant(np.array([count]))
    end = op.constant(np.array([np.iinfo(np.int64).max]))
    on_own = op.Slice(joint, op.constant(np.array([0])), start, last)
    weights = op.Mul(op.Slice(joint, start, end, last), gate)
    answers = op.Add(op.MatMul(weights, value), op.MatMul(on_own, values))
    return op.Div(answers, op.Add(op.Add(op.ReduceSum(weights, last), op.ReduceSum(on_own, last)), total))
