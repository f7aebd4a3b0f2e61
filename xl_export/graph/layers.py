"""Writes the parts that all graphs of a model share.

They are weights by name, projections, heads, norms and feed-forward networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trainer.model.config import ModelConfig
from xl_export.graph.ops import Ops

Weights = Mapping[str, np.ndarray]  # the names of trainer.model.model.LanguageModel's state dict


class Layers:
    """Writes parts of a model into one graph, whose nodes `op` records."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.op = Ops()

    def weight(self, name: str, *, transpose: bool = False) -> ir.Value:
        array = self.weights[name]
        return self.op.constant(array.T, name + ".T") if transpose else self.op.constant(array, name)

    def projection(self, layer: int, kind: str, heads: Sequence[int] | None = None) -> np.ndarray:
        """Returns W [D, H·K] of a layer's query, key or value.

        kind: `query`, `key` or `value`; the query's W includes the factor 1/sqrt(K). heads: the heads whose
        columns are returned; None for all.
        """
        matrix = self.weights[f"blocks.{layer}.{kind}.weight"].T
        if heads is not None:
            matrix = matrix.reshape(len(matrix), self.config.heads, self.config.head_dim)[
                :, list(heads)
            ].reshape(len(matrix), -1)
        return matrix * np.float32(self.config.head_dim**-0.5) if kind == "query" else matrix

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        return self.op.LayerNormalization(
            x, *self.norm_weights(name), axis=-1, epsilon=self.config.norm_epsilon
        )

    def norm_weights(self, name: str) -> list[ir.Value]:
        return [self.weight(f"{name}.weight"), self.weight(f"{name}.bias")]

    def feed_forward(self, layer: int, x: ir.Value) -> ir.Value:
        op = self.op
        name = f"blocks.{layer}."
        inner = op.Relu(
            op.Add(
                op.MatMul(x, self.weight(name + "expand.weight", transpose=True)),
                self.weight(name + "expand.bias"),
            )
        )
        return op.Add(
            op.MatMul(inner, self.weight(name + "contract.weight", transpose=True)),
            self.weight(name + "contract.bias"),
        )

    def scores(self, query: ir.Value, key: ir.Value) -> ir.Value:
        """Products [B, H, T, J] of queries [B, H, T, K] and keys [B, H, J, K]."""
        return self.op.MatMul(query, self.op.Transpose(key, perm=[0, 1, 3, 2]))

    def split_heads(self, x: ir.Value) -> ir.Value:
        """Returns [B, H, T, K] of [B, T, H·K]."""
        return self.op.Transpose(
            self.op.Reshape(x, self.op.constant(np.array([0, 0, -1, self.config.head_dim]))),
            perm=[0, 2, 1, 3],
        )

    def join_heads(self, x: ir.Value) -> ir.Value:
        """Returns [B, T, H·K] of [B, H, T, K]."""
        return self.op.Reshape(
            self.op.Transpose(x, perm=[0, 2, 1, 3]), self.op.constant(np.array([0, 0, -1]))
        )
