"""The fp32 graph over the weights that a lowered graph stores: what such an artefact is to compute.

Engines that multiply in few bits round activations too, each in its own way. This graph rounds the weights
alone, so its answers are the same on every machine but for the order of additions. They are the reference
that all engines of an artefact are compared with.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from xl_export.graph.ops import remove_unused_nodes
from xl_export.graph.quantise import (
    BLOCK,
    COLUMN_SCALES,
    SCALES,
    Matrix,
    constant,
    embedding_of,
    matrix_of,
)


def put_at_stored_values(exact: ir.Model, lowered: ir.Model) -> None:
    """Gives the constants of an fp32 graph the values that a lowered graph of the same model stores for them.

    exact: the graph that is changed. Constants that the lowered graph stores in float32 or does not have stay
    as they are.
    """
    graph, stored = exact.graph, _Stored(lowered)
    for node in list(graph):
        matrix = matrix_of(node)
        at = 1
        if matrix is None:
            matrix, at = embedding_of(node), 0
        if matrix is None or (array := stored.matrix(matrix)) is None:
            continue
        # A MatMul takes [K, N], whatever it was turned from; a Gemm and a look-up take their own layout.
        turned = matrix.turned and node.op_type != "MatMul"
        name = f"{matrix.name}.{'rows' if turned else 'matrix'}.rounded"
        if name not in graph.initializers:
            constant(graph, name, np.ascontiguousarray(array.T if turned else array))
        node.replace_input_with(at, graph.initializers[name])
    for name, value in graph.initializers.items():
        if (array := stored.table(name)) is not None:
            value.const_value = ir.tensor(array, name=name)
    remove_unused_nodes(exact)


class _Stored:
    """The constants of a lowered graph as float32 arrays of what they stand for."""

    def __init__(self, model: ir.Model) -> None:
        self.constants = model.graph.initializers

    def matrix(self, matrix: Matrix) -> np.ndarray | None:
        """W [K, N] of a product; None where the graph does not store it in fewer bits."""
        rows = len(matrix.array)
        if (values := self.array(f"{matrix.name}.int8")) is not None:
            scales = self.array(f"{matrix.name}{COLUMN_SCALES}")
            assert scales is not None, matrix.name
            return (values.T if matrix.turned else values).astype(np.float32) * scales
        parts = [self.array(f"{matrix.name}.{kind}") for kind in ("values", "scales", "zero_points")]
        if all(part is not None for part in parts):
            return _of_blocks(*parts, rows=rows)
        values, scales = (self.array(f"{matrix.source}.{kind}") for kind in ("values", "scales"))
        if values is None or scales is None:
            return None
        block = rows // len(scales) if scales.ndim == 2 else rows  # as TensorRT has them, by DequantizeLinear
        return values.astype(np.float32) * np.repeat(np.atleast_2d(scales).astype(np.float32), block, axis=0)

    def table(self, name: str) -> np.ndarray | None:
        """A constant that is no matrix of a product; None where it is stored in float32."""
        values, scales = self.array(f"{name}.int8"), self.array(name + SCALES)
        if values is not None and scales is not None:
            return values.astype(np.float32) * scales
        halves = self.constants.get(f"{name}.fp16")
        return None if halves is None else self.array(name)

    def array(self, name: str) -> np.ndarray | None:
        """A constant by the name it had before small numbers became halves, which are widened."""
        value = self.constants.get(name)
        if value is None and (halves := self.constants.get(f"{name}.fp16")) is not None:
            assert halves.const_value is not None, name
            return halves.const_value.numpy().astype(np.float32)
        return None if value is None or value.const_value is None else value.const_value.numpy()


def _of_blocks(values: np.ndarray, scales: np.ndarray, zero_points: np.ndarray, *, rows: int) -> np.ndarray:
    """W [K, N] of the blocks that `quantise.quantised` makes."""
    columns, blocks = len(values), values.shape[1]
    if values.shape[2] < BLOCK:  # two numbers in a byte, the first in the low bits
        values = np.stack([values & 15, values >> 4], axis=-1)
        zero_points = np.stack([zero_points & 15, zero_points >> 4], axis=-1)
    numbers = values.reshape(columns, blocks, BLOCK).astype(np.float32)
    zeros = zero_points.reshape(columns, -1)[:, :blocks, None].astype(np.float32)
    wide = (numbers - zeros) * scales.reshape(columns, blocks, 1).astype(np.float32)
    return np.ascontiguousarray(wide.reshape(columns, -1)[:, :rows].T)
