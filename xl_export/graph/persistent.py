"""Attention over persistent vectors in the graph: constants, so they need no memory, no mask and no
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from trainer.model.config import ModelConfig
from xl_export.graph.layers import Layers


def context_and_persistent(
    layers: Layers,
    layer: int,
    heads: Sequence[int],
    query: ir.Value,
    content: ir.Value,
    key: ir.Value,
    value: ir.Value,
    bias: ir.Value,
) -> ir.Value:
    """One softmax over context and persistent vectors (Sukhbaatar et al. 2019b, equation 9): [B, h, T, K].

    The two products stay apart and only their scores are joined, so the memory is not copied.
    """
    op, name = layers.op, f"blocks.{layer}.persistent.{heads[0]}."
    mine, values = (table[list(heads)] for table in persistent_tables(layers, layer))
    context_BHTJ = op.Add(op.MatMul(content, op.Transpose(key, perm=[0, 1, 3, 2])), bias)
    own_BHTN = op.MatMul(query, op.constant(mine.transpose(0, 2, 1), name + "key"))
    weights = op.Softmax(op.Concat(own_BHTN, context_BHTJ, axis=3), axis=-1)
    count, last = op.constant(np.array([mine.shape[1]])), op.constant(np.array([3]))
    end = op.constant(np.array([np.iinfo(np.int64).max]))
    on_own = op.Slice(weights, op.constant(np.array([0])), count, last)
    on_context = op.Slice(weights, count, end, last)
    return op.Add(op.MatMul(on_context, value), op.MatMul(on_own, op.constant(values, name + "value")))


def attend_persistent(
    layers: Layers, config: ModelConfig, layer: int, query: ir.Value, order: Sequence[int] | None = None
) -> ir.Value:
    """Attention of queries [B, h, T, K] over persistent vectors alone.

    order: of the heads in `query`, where it is not theirs in the model.
    """
    op, name = layers.op, f"blocks.{layer}.persistent."
    key, value = persistent_tables(layers, layer, scaled=config.sublayers != "ff-attn")
    if (
        order is not None and config.sublayers == "single-head"
    ):  # one head as wide as all: its columns follow the heads
        columns = np.arange(config.heads * config.head_dim).reshape(config.heads, -1)[list(order)].ravel()
        key, value = key[..., columns], value[..., columns]
    elif order is not None:
        key, value = key[list(order)], value[list(order)]
    weights = op.Softmax(op.MatMul(query, op.constant(key.transpose(0, 2, 1), name + "key")), axis=-1)
    return op.MatMul(weights, op.constant(value, name + "value"))


def persistent_tables(layers: Layers, layer: int, *, scaled: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [h, N, K] for queries that carry 1/sqrt(K) already, or (ff-attn) none at all.

    A score is q·(k sqrt(W)) / sqrt(W) = q·k for stored keys of width W, whatever W is.
    """
    key, value = (layers.weights[f"blocks.{layer}.persistent.{kind}"] for kind in ("key", "value"))
    return key * np.float32(layers.head_dim**0.5 if scaled else 1.0), value * np.float32(
        value.shape[1] ** 0.5
    )
