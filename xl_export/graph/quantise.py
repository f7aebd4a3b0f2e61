"""Stores weights in fewer bits: passes over the finished fp32 graph, one for each preset.

| preset | weights | products |
|---|---|---|
| fp16 | half precision; they are widened when the graph is loaded | fp32: a smaller file, the same time |
| int8-stored | bytes with a scale for each column, widened when the graph is loaded | fp32: the same |
| int8 | blocks of 32 along the sum, each with a scale and a zero point | int8 activations (`MatMulNBits`) |
| int4 | the same with 4 bits | the same |

ONNX Runtime's own quantiser quantises the tables of the vocabulary, and the matrices that activations are
multiplied by, for int8 and int4. Position tables and persistent vectors are in int8 with these presets and
with int8-stored, with a scale for each distance or vector of a head: the fused operator multiplies by the
bytes, and other graphs widen them when they are loaded. All other constants (norms, biases) are stored in
half precision.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from runtimes.base.startup import load_onnxruntime
from runtimes.contract.conversion import in_bytes
from runtimes.contract.precision import PRESETS, Precision
from xl_export.graph.fused_cpu import SCALES_OF, matrices_of, reads_tables
from xl_export.graph.ops import constant, remove_unused_nodes

BLOCK = 32  # values that share a scale
ACCURACY_LEVEL = (
    4  # activations in int8; level 0 multiplies in fp32 and is a hundred times slower with 8 bits
)
MIN_VALUES = 1024  # values; constants with fewer are not changed
MICROSOFT = "com.microsoft"
# The ends of the names of scales that stay in float32: they may be too small for half precision.
SCALES = ".table_scales"
COLUMN_SCALES = ".column_scales"


def lowered(model: ir.Model, precision: Precision) -> ir.Model:
    """Returns the fp32 step graph with its weights in a preset's precision; `model` itself is changed."""
    preset = PRESETS[precision]
    if preset.rounds_activations or precision == "int8-stored":
        quantise(model, preset.bits if preset.rounds_activations else None)
        store_tables_in_bytes(model)
    if precision != "fp32":
        halve(model)
    return model


def halve(model: ir.Model) -> None:
    """Stores every float32 constant of at least `MIN_VALUES` values in float16.

    A Cast follows each of them, which ONNX Runtime computes once, when it loads the graph. The fused operator
    reads position tables and persistent vectors in float16, so they need no Cast.
    """
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        array = _floats(value)
        if array is None or array.size < MIN_VALUES or name.endswith((SCALES, COLUMN_SCALES)):
            continue
        _replace_constant(graph, value, constant(graph, f"{name}.fp16", _half(array)))


def quantise(model: ir.Model, bits: int | None) -> None:
    """Stores the matrices of products and the vocabulary's tables in few bits; `model` itself is changed.

    bits: 8 or 4 in blocks, of `MatMulNBits` and `GatherBlockQuantized`. None is int8 with a float32 scale for
    each column: a Cast follows each matrix, which ONNX Runtime computes once, when it loads the graph, and
    the scales multiply what the products give. Scaled matrices would be computed when the graph is loaded
    too, but ONNX Runtime keeps what all steps of such a computation give until the last of them, so loading
    would take twice the bytes.
    """
    graph = model.graph
    if bits is not None:
        model.opset_imports[MICROSOFT] = 1
    for node in list(graph):
        for index, matrix in read_matrices(node).items():
            _replace_matrix(
                node, index, matrix.in_bytes(graph) if bits is None else matrix.stored(graph, bits)
            )
        if (product := product_of(node)) is not None:
            new = (
                _scaled_product(graph, node, product)
                if bits is None
                else _multiplied(graph, node, product, bits)
            )
        elif (table := embedding_of(node)) is not None:
            new = _scaled_rows(graph, node, table) if bits is None else _gathered(graph, node, table, bits)
        else:
            continue
        _replace(graph, node, new)
    remove_unused_nodes(model)  # transposes and constants that nothing reads any more


def _replace_matrix(node: ir.Node, index: int, parts: Sequence[ir.Value]) -> None:
    """Gives a fused node the parts of a matrix in place of the matrix: values, scales and zero points."""
    for at, part in zip((index, *matrices_of(node)[index]), parts, strict=False):
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, part)


def _replace(graph: ir.Graph, node: ir.Node, new: list[ir.Node]) -> None:
    """Puts nodes in the place of one; the output of the last of them takes the name of its output."""
    for at, made in enumerate(new[:-1]):
        made.outputs[0].name = f"{node.outputs[0].name}.{made.op_type}.{at}"
    new[-1].outputs[0].name = node.outputs[0].name
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, node.outputs, new[-1].outputs)


def store_tables_in_bytes(model: ir.Model) -> None:
    """Stores position tables and persistent vectors of at least `MIN_VALUES` in int8, with float32 scales.

    A column of a table [h, K, R], which is one distance or key, or a value of [h, N, K] has one scale.
    """
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        array = _floats(value)
        axis = _summed_axis(name)
        if array is None or axis is None or array.size < MIN_VALUES:
            continue
        bytes_, scales = in_bytes(array, axis)
        stored = constant(graph, f"{name}.int8", bytes_)
        factors = constant(graph, name + SCALES, scales)
        _replace_constant(graph, value, stored, factors)


def _replace_constant(
    graph: ir.Graph, value: ir.Value, stored: ir.Value, scales: ir.Value | None = None
) -> None:
    """Replaces a constant by a smaller one and its scales: the fused operator reads both, and for all other
    nodes a Cast and a Mul follow.
    """
    for node, index in list(value.uses()):
        if reads_tables(node) and index in SCALES_OF:
            node.replace_input_with(index, stored)
            if scales is not None:
                node.resize_inputs(max(len(node.inputs), SCALES_OF[index] + 1))
                node.replace_input_with(SCALES_OF[index], scales)
    if value.uses():
        made = [ir.node("Cast", [stored], {"to": int(ir.DataType.FLOAT)})]
        if scales is not None:
            made[0].outputs[0].name = f"{value.name}.cast"
            made.append(ir.node("Mul", [made[0].outputs[0], scales]))
        made[-1].outputs[0].name = f"{value.name}.fp32"
        graph.insert_before(graph[0], made)
        value.replace_all_uses_with(made[-1].outputs[0])
    del graph.initializers[str(value.name)]


def _summed_axis(name: str) -> int | None:
    """The axis of a table or of persistent vectors that one scale is for; None for every other constant."""
    if name.endswith(".position_table") or (".persistent." in name and name.endswith(".key")):
        return 1
    return 2 if ".persistent." in name and name.endswith(".value") else None


def quantised(matrix: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the blocks of W [K, N]: values, scales and zero points.

    A block has `BLOCK` values along K; the last one is filled with zeros. Values are uint8 [N, blocks, BLOCK
    · bits / 8], scales are float32 [N, blocks], and zero points are uint8 [N, blocks], with two of them in a
    byte for 4 bits.
    """
    packed, scales, zero_points = _quantiser(bits).qbits_block_quant(np.ascontiguousarray(matrix))
    return packed, scales, zero_points


@functools.cache
def _quantiser(bits: int) -> Any:
    load_onnxruntime()
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    return tool.DefaultWeightOnlyQuantizer(
        tool.DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=False, bits=bits)
    )


@dataclass(frozen=True)
class Matrix:
    """A constant W [K, N] of a product x·W."""

    source: str  # its name
    array: np.ndarray
    turned: bool  # whether the graph has it as [N, K]

    @property
    def name(self) -> str:
        """The beginning of the names of its parts: both layouts of one constant may be quantised."""
        return self.source if self.turned else f"{self.source}.columns"

    def stored(self, graph: ir.Graph, bits: int) -> list[ir.Value]:
        """Returns the parts of the matrix as constants of the graph.

        They are stored once, although an embedding and the output layer that is tied to it both read them.
        """
        kinds = [f"{self.name}.{kind}" for kind in ("values", "scales", "zero_points")]
        if kinds[0] not in graph.initializers:
            for name, part in zip(kinds, quantised(self.array, bits), strict=True):
                constant(graph, name, part)
        return [graph.initializers[name] for name in kinds]

    def in_bytes(self, graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
        """Returns the matrix as int8 in the graph's layout, and its scales [N], stored once."""
        name = f"{self.name}.int8"
        scales = f"{self.name}{COLUMN_SCALES}"
        if name not in graph.initializers:
            bytes_, factors = in_bytes(self.array, 0)
            constant(graph, name, bytes_.T if self.turned else bytes_)
            constant(graph, scales, factors[0])
        return graph.initializers[name], graph.initializers[scales]


def product_of(node: ir.Node) -> Matrix | None:
    """Returns the matrix of a product that is quantised; None for every other node.

    A matrix of fewer than `BLOCK` rows is left as it is: a scale for each column would not save anything.
    """
    matrix = matrix_of(node)
    return matrix if matrix is not None and matrix.array.shape[0] >= BLOCK else None


def read_matrices(node: ir.Node) -> dict[int, Matrix]:
    """The matrices of a fused node that are quantised, by the index of the input."""
    turned = bool(node.attributes.get_int("turned", 0)) if matrices_of(node) else False
    found = {
        index: _matrix(node.inputs[index], turned=turned)
        for index in matrices_of(node)
        if index < len(node.inputs)
    }
    return {
        index: matrix
        for index, matrix in found.items()
        if matrix is not None and matrix.array.shape[0] >= BLOCK
    }


def matrix_of(node: ir.Node) -> Matrix | None:
    """Returns the matrix of a product; None for every other node."""
    if node.op_type not in ("MatMul", "Gemm") or not _is_plain(node):
        return None
    value = node.inputs[1]
    turned = bool(node.attributes.get_int("transB", 0))
    behind = None if value is None else value.producer()
    if behind is not None and behind.op_type == "Transpose":
        value = behind.inputs[0]
        turned = not turned
    return _matrix(value, turned=turned)


def _is_plain(node: ir.Node) -> bool:
    """Whether a product is x·W, or x·Wᵀ, plus C where there is one: a Gemm may scale them, and turn x."""
    attributes = node.attributes
    scales = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return scales == [1.0, 1.0] and not attributes.get_int("transA", 0)


def embedding_of(node: ir.Node) -> Matrix | None:
    """Returns the table [V, D] of a look-up in the vocabulary, transposed as in the output layer."""
    by_row = node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0
    table = _matrix(node.inputs[0], turned=True) if by_row else None
    return (
        table
        if table is not None and table.name.startswith("vocabulary.") and table.array.shape[0] >= BLOCK
        else None
    )


def _matrix(value: ir.Value | None, *, turned: bool) -> Matrix | None:
    array = _floats(value)
    if value is None or array is None or array.ndim != 2:
        return None
    return Matrix(str(value.name), array.T if turned else array, turned)


def _multiplied(graph: ir.Graph, node: ir.Node, matrix: Matrix, bits: int) -> list[ir.Node]:
    K, N = matrix.array.shape
    attributes = {"K": K, "N": N, "bits": bits, "block_size": BLOCK, "accuracy_level": ACCURACY_LEVEL}
    made = [
        ir.node("MatMulNBits", [node.inputs[0], *matrix.stored(graph, bits)], attributes, domain=MICROSOFT)
    ]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        made.append(ir.node("Add", [made[0].outputs[0], node.inputs[2]]))
    return made


def _scaled_product(graph: ir.Graph, node: ir.Node, matrix: Matrix) -> list[ir.Node]:
    """The same product with a matrix of bytes, its columns scaled after it.

    What is turned is turned before the Cast: ONNX Runtime then keeps no second matrix in float32.
    """
    values, scales = matrix.in_bytes(graph)
    turn = (
        [ir.node("Transpose", [values], {"perm": [1, 0]})] if matrix.turned and node.op_type != "Gemm" else []
    )
    wide = ir.node("Cast", [turn[0].outputs[0] if turn else values], {"to": int(ir.DataType.FLOAT)})
    attributes = {"transB": int(matrix.turned)} if node.op_type == "Gemm" else {}
    product = ir.node(node.op_type, [node.inputs[0], wide.outputs[0]], attributes)
    made = [*turn, wide, product, ir.node("Mul", [product.outputs[0], scales])]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]]))
    return made


def _scaled_rows(graph: ir.Graph, node: ir.Node, table: Matrix) -> list[ir.Node]:
    """The same look-up in a table of bytes; the rows that it finds are widened and scaled."""
    values, scales = table.in_bytes(graph)
    last = _shared(graph, "last_axis", [-1])
    rows, factors = (ir.node("Gather", [x, node.inputs[1]], {"axis": 0}) for x in (values, scales))
    wide = ir.node("Cast", [rows.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    column = ir.node("Unsqueeze", [factors.outputs[0], last])
    return [rows, factors, wide, column, ir.node("Mul", [wide.outputs[0], column.outputs[0]])]


def _gathered(graph: ir.Graph, node: ir.Node, table: Matrix, bits: int) -> list[ir.Node]:
    values, scales, zero_points = table.stored(graph, bits)
    width, rows = table.array.shape
    blocks = -(-width // BLOCK)
    flat = _shared(graph, f"{table.name}.flat", [rows, blocks * BLOCK * bits // 8])
    made = [ir.node("Reshape", [values, flat])]
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    inputs = [made[0].outputs[0], node.inputs[1], scales, zero_points]
    made.append(ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT))
    if width != blocks * BLOCK:
        bounds = [
            _shared(graph, f"{table.name}.{key}", [x])
            for key, x in (("from", 0), ("to", width), ("axis", -1))
        ]
        made.append(ir.node("Slice", [made[1].outputs[0], *bounds]))
    return made


def _shared(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    """A constant of that name, the same for all look-ups in a table."""
    return graph.initializers.get(name) or constant(graph, name, np.array(numbers))


def _floats(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of a float32 constant; None for every other value."""
    tensor = None if value is None else value.const_value
    return tensor.numpy() if tensor is not None and tensor.dtype == ir.DataType.FLOAT else None


def _half(array: np.ndarray) -> np.ndarray:
    """Returns float16 values; values beyond the range become its largest, and infinities (masks) stay."""
    most = np.finfo(np.float16).max
    return np.where(np.isinf(array), array, np.clip(array, -most, most)).astype(np.float16)
