"""Writes attention over persistent vectors, and attention whose weights are masked after the softmax.

Persistent vectors are constants of the graph, so they need no memory, no mask and no positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from xl_export.graph.layers import Layers

# Replaces minus infinity, so that a query without visible keys is not NaN: its scores are all equal, and its
# weights are multiplied by 0 afterwards. Scores are too small to change it when it is added to them. It is a
# power of two, since runtimes fuse a softmax to 2^(score * c - largest * c): without rounding of the first
# product the difference of equal scores must still be 0, and for -1e30 it is about 1e22.
LEAST_SCORE = np.float32(-(2.0**100))


def attend_in_products(
    layers: Layers,
    key: ir.Value,
    value: ir.Value,
    *,
    content: ir.Value,
    bias: ir.Value,
    sees: ir.Value | None,
) -> ir.Value:
    """Returns the answers [B, h, T, K] of plain attention, without the operator Attention.

    The arguments are those of `attend_by_parts`. sees: float [B, 1, T, 1], 0 for queries without visible
    keys, whose answers are then 0; None if all queries see a key.
    """
    op = layers.op
    scores = op.Add(layers.scores(content, key), bias)
    answer = op.MatMul(op.Softmax(scores, axis=-1), value)
    return answer if sees is None else op.Mul(answer, sees)


def attend_by_parts(
    layers: Layers,
    key: ir.Value,
    value: ir.Value,
    *,
    content: ir.Value,
    bias: ir.Value,
    gate: ir.Value | None = None,
    epsilon: float = 0.0,
    persistent: tuple[ir.Value, ir.Value, ir.Value] | None = None,
) -> ir.Value:
    """Returns the answers [B, h, T, K] of attention whose weights are needed by themselves.

    content: queries with u, [B, h, T, K]. key, value: [B, h, J, K]. bias: what is added to the scores,
    [B, h, T, J].

    gate: factors of the weights after the softmax, [B, h, T, J], 0 for keys that are not visible. Then the
    weights are divided by their sum plus epsilon, and a query without visible keys gets zeros. The public
    code of adaptive spans has this form (`SpanConfig.epsilon`). Without an epsilon the mask is part of the
    scores, as log m(d), and a plain softmax is enough.

    persistent: queries without u, and persistent keys [h, K, N] and values [h, N, K], which share the softmax
    with the context (Sukhbaatar et al. 2019b, equation 9) and are not gated. The two products stay separate
    and only their scores are concatenated, so the memory is not copied.
    """
    op = layers.op
    last = op.constant(np.array([3]))
    if gate is not None:
        bias = op.Max(bias, op.constant(LEAST_SCORE))
    weights = op.Add(layers.scores(content, key), bias)
    if persistent is None:
        weights = op.Softmax(weights, axis=-1)
    else:
        query, own_keys, own_values = persistent
        assert own_values.shape is not None, "a constant has a shape"
        both = op.Softmax(op.Concat(op.MatMul(query, own_keys), weights, axis=3), axis=-1)
        count = op.constant(np.array([own_values.shape[1]]))
        on_own = op.Slice(both, op.constant(np.array([0])), count, last)
        weights = op.Slice(both, count, op.constant(np.array([np.iinfo(np.int64).max])), last)
    if gate is not None:
        weights = op.Mul(weights, gate)
    answers = op.MatMul(weights, value)
    if persistent is not None:
        answers = op.Add(answers, op.MatMul(on_own, own_values))
    if gate is None:
        return answers
    total = op.ReduceSum(weights, last)
    if persistent is not None:
        total = op.Add(total, op.ReduceSum(on_own, last))
    return op.Div(answers, op.Add(total, op.constant(np.float32(epsilon))))


def attend_persistent(
    layers: Layers, layer: int, query: ir.Value, order: Sequence[int] | None = None
) -> ir.Value:
    """Returns attention of queries [B, h, T, K] over only the persistent vectors.

    order: the order of the heads in `query` if it differs from the model's.
    """
    op = layers.op
    config = layers.config
    name = f"blocks.{layer}.persistent."
    key, value = persistent_tables(layers, layer)
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


def persistent_tables(layers: Layers, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values [h, N, K] for queries that include 1/sqrt(K), which ff-attn's do not.

    A score is q·(k sqrt(W)) / sqrt(W) = q·k for stored keys of any width W.
    """
    key, value = (layers.weights[f"blocks.{layer}.persistent.{kind}"] for kind in ("key", "value"))
    scale = 1.0 if layers.config.sublayers == "ff-attn" else layers.config.head_dim**0.5
    return key * np.float32(scale), value * np.float32(value.shape[1] ** 0.5)
