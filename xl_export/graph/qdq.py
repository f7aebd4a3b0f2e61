"""Stores the matrices of a graph for TensorRT in fewer bits: a pass over the float32 graph.

Each matrix W [K, N] that activations are multiplied by becomes small numbers, and a DequantizeLinear makes
W of them again:

| precision | stored as | one scale for |
|---|---|---|
| int8 | 8-bit integers | each column |
| int4 | 4-bit integers | each 128 rows of a column; 64, 32 or 16 where K is no multiple of 128 |

Activations are not quantised, so nothing is calibrated. The tables of the vocabulary, position tables,
persistent vectors, norms and biases keep their type: TensorRT looks nothing up in a quantised table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.base.errors import ConfigError
from runtimes.contract.precision import Precision
from xl_export.graph.ops import constant, remove_unused_nodes
from xl_export.graph.quantise import MIN_VALUES

BLOCK_SIZES = (128, 64, 32, 16)  # rows that share a scale, the first that divides K; TensorRT takes no others
# Of the largest value; a smaller scale cuts it off and rounds the rest less.
CLIP_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
MIN_SCALE = np.finfo(np.float16).smallest_subnormal  # a scale is stored in float16
PREFIX = "blocks."  # of the names of the layers' matrices


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the values of a matrix are stored."""

    dtype: ir.DataType
    largest: float  # largest value of the format
    in_blocks: bool = False  # see `BLOCK_SIZES`


FORMATS: dict[Precision, Format] = {
    "int8": Format(dtype=ir.DataType.INT8, largest=127),
    "int4": Format(dtype=ir.DataType.INT4, largest=7, in_blocks=True),
}


def dequantised(model: ir.Model, precision: Precision) -> ir.Model:
    """Returns the float32 graph with its layers' matrices in a precision; `model` itself is changed.

    Raises ConfigError if a matrix cannot be cut into blocks, and if no matrix is large enough.
    """
    chosen = FORMATS[precision]
    made = dict[str, ir.Value]()
    for node in list(model.graph):
        matrix = _matrix(node)
        if matrix is None:
            continue
        name = str(matrix.name)
        if name not in made:
            made[name] = _stored(model.graph, node, name, matrix, chosen, precision)
        node.replace_input_with(1, made[name])
    if not made:
        raise ConfigError(
            f"--precision is {precision}, and no layer of the model has a matrix of at least {MIN_VALUES} "
            "values; give --precision fp16."
        )
    remove_unused_nodes(model)
    return model


def quantised(matrix: np.ndarray, chosen: Format, block: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [K, N] in fewer bits, and its scales float32 [K / block, N], or [N] without blocks.

    The scales are float16 values. Of `CLIP_SHARES` each has the one with the least squared error.
    """
    rows = len(matrix) if block is None else block
    blocks = matrix.astype(np.float32).reshape(-1, rows, matrix.shape[1])
    highest = np.abs(blocks).max(axis=1, keepdims=True)
    scales = np.ones_like(highest)
    values = np.zeros_like(blocks)
    least = np.full_like(highest, np.inf)
    for share in CLIP_SHARES:
        tried = np.maximum((share * highest / chosen.largest).astype(np.float16), MIN_SCALE).astype(
            np.float32
        )
        rounded = np.rint(np.clip(blocks / tried, -chosen.largest, chosen.largest))
        error = ((rounded * tried - blocks) ** 2).sum(axis=1, keepdims=True)
        better = error < least
        scales = np.where(better, tried, scales)
        least = np.where(better, error, least)
        values = np.where(better, rounded, values)
    stored = values.reshape(matrix.shape).astype(chosen.dtype.numpy())
    return stored, scales[:, 0] if block else scales[0, 0]


def _matrix(node: ir.Node) -> ir.Value | None:
    """Returns the constant [K, N] of a layer's product x·W; None for every other node."""
    value = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    tensor = None if value is None else value.const_value
    if value is None or tensor is None or not str(value.name).startswith(PREFIX):
        return None
    return value if len(tensor.shape) == 2 and tensor.size >= MIN_VALUES else None


def _stored(
    graph: ir.Graph, node: ir.Node, name: str, matrix: ir.Value, chosen: Format, precision: Precision
) -> ir.Value:
    """Adds the parts of a matrix and their DequantizeLinear before a node; returns the matrix of them."""
    assert matrix.const_value is not None, matrix
    array = matrix.const_value.numpy()
    block = _block(len(array), name, precision) if chosen.in_blocks else None
    values, scales = quantised(array, chosen, block)
    parts = [constant(graph, f"{name}.values", values), constant(graph, f"{name}.scales", scales)]
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    made = ir.node("DequantizeLinear", parts, attributes)
    made.outputs[0].name = f"{name}.dequantised"
    made.outputs[0].dtype = ir.DataType.FLOAT
    made.outputs[0].shape = matrix.shape
    graph.insert_before(node, made)
    return made.outputs[0]


def _block(rows: int, name: str, precision: Precision) -> int:
    for block in BLOCK_SIZES:
        if rows % block == 0:
            return block
    raise ConfigError(
        f"--precision is {precision}, and {name} has {rows} rows, which is no multiple of {BLOCK_SIZES[-1]}; "
        "give --precision int8."
    )
