"""Writes attention over persistent vectors.

They are constants of the graph, so they need no memory, no mask and no positions.
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
    """Returns the answers [B, h, T, K] of one softmax over context and persistent vectors.

    Source: Sukhbaatar et al. 2019b, equation 9. The two products stay separate and only their scores are
    concatenated, so the memory is not copied.
    """
    op, (keys, values) = layers.op, persistent_constants(layers, layer, heads)
    context_BHTJ = op.Add(op.MatMul(content, op.Transpose(key, perm=[0, 1, 3, 2])), bias)
    weights = op.Softmax(op.Concat(op.MatMul(query, keys), context_BHTJ, axis=3), axis=-1)
    count = op.constant(np.array([layers.weights[f"blocks.{layer}.persistent.key"].shape[1]]))
    last = op.constant(np.array([3]))
    end = op.constant(np.array([np.iinfo(np.int64).max]))
    on_own = op.Slice(weights, op.constant(np.array([0])), count, last)
    on_context = op.Slice(weights, count, end, last)
    return op.Add(op.MatMul(on_context, value), op.MatMul(on_own, values))


def attend_persistent(
    layers: Layers, config: ModelConfig, layer: int, query: ir.Value, order: Sequence[int] | None = None
) -> ir.Value:
    """Returns attention of queries [B, h, T, K] over persistent vectors alone.

    order: the order of the heads in `query`, where it differs from that of the model.
    """
    op = layers.op
    name = f"blocks.{layer}.persistent."
    key, value = persistent_tables(layers, layer, scaled=config.sublayers != "ff-attn")
    # A single head is as wide as all heads together: its columns are in the order of the heads.
    if order is not None and config.sublayers == "single-head":
        columns = np.arange(config.heads * config.head_dim).reshape(config.heads, -1)[list(order)].ravel()
        key = key[..., columns]
        value = value[..., columns]
    elif order is not None:
        key = key[list(order)]
        value = value[list(order)]
    weights = op.Softmax(op.MatMul(query, op.constant(key.transpose(0, 2, 1), name + "key")), axis=-1)
    return op.MatMul(weights, op.constant(value, name + "value"))


def persistent_constants(layers: Layers, layer: int, heads: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Returns keys [h, K, N] and values [h, N, K] of some heads as constants of the graph."""
    keys, values = (table[list(heads)] for table in persistent_tables(layers, layer))
    name = f"blocks.{layer}.persistent.{heads[0]}."
    return (
        layers.op.constant(keys.transpose(0, 2, 1), name + "key"),
        layers.op.constant(values, name + "value"),
    )


def persistent_tables(layers: Layers, layer: int, *, scaled: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values [h, N, K] for queries that include 1/sqrt(K).

    scaled: False for the queries of ff-attn, which do not include it. A score is q·(k sqrt(W)) / sqrt(W) =
    q·k for stored keys of any width W.
    """
    key, value = (layers.weights[f"blocks.{layer}.persistent.{kind}"] for kind in ("key", "value"))
    return key * np.float32(layers.head_dim**0.5 if scaled else 1.0), value * np.float32(
        value.shape[1] ** 0.5
    )
