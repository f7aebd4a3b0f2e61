"""Replaces products of a traced step by operators of ONNX Runtime that are faster for one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from xl_export.graph.ops import constant
from xl_export.graph.sizes import Sizes, broadcast, sizes_of
from xl_export.tracing.views import constant_of


def multiply_convolutions(graph: ir.Graph) -> None:
    """Computes one output of a depthwise convolution by a product and a sum.

    ONNX Runtime multiplies matrices channel by channel, which takes ten times as long for one output.
    """
    for node in list(graph):
        length, width = _depthwise(node)
        if not width:
            continue
        new = _Before(graph, node)
        (x, weight, *bias), y = node.inputs, node.outputs[0]
        unused = [y]
        if length != width:  # all but the last output may be computed for nothing
            users = [user for user, _ in y.uses()]
            if y.is_graph_output() or not all(_ends(user, 1) for user in users):
                continue
            unused = [user.outputs[0] for user in users]
            x = _last(new, x, width)
        B, C, _ = sizes_of(x) or ()
        product = new.value("Mul", [x, new.view(weight, [C, width])], [B, C, width])
        last = new.value("ReduceSum", [product, new.numbers("axis", [2])], [B, C, 1], keepdims=1)
        if bias:
            last = new.value("Add", [last, new.view(bias[0], [C, 1])], [B, C, 1])
        for value in unused:
            value.replace_all_uses_with(last, replace_graph_outputs=True)
    graph.sort()  # the last inputs may be taken after the convolution


def put_constants_last(graph: ir.Graph) -> None:
    """Multiplies a row by a constant where a constant is multiplied by a column [..., K, 1].

    Only the second factor of a product is quantised.
    """
    turned: dict[ir.Value | None, ir.Value] = {}  # one for all tokens of a step
    for node in list(graph):
        if node.op_type != "MatMul" or constant_of(node.inputs[0]) is None:
            continue
        matrix, column = node.inputs
        wide, sizes = sizes_of(matrix) or (), sizes_of(column) or ()
        if len(wide) != 2 or len(sizes) < 3 or sizes[-1] != 1:
            continue
        new = _Before(graph, node)
        (N, K), before, rank = wide, sizes[:-2], len(sizes)
        swap = [*range(rank - 2), rank - 1, rank - 2]
        row = new.value("Transpose", [column], [*before, 1, K], perm=swap)
        if matrix not in turned:
            turned[matrix] = new.value("Transpose", [matrix], [K, N], perm=[1, 0])
        product = new.value("MatMul", [row, turned[matrix]], [*before, 1, N])
        new.replace(new.value("Transpose", [product], [*before, N, 1], perm=swap))


def order_products(graph: ir.Graph) -> None:
    """Multiplies first the two of three factors that have the smallest product, and columns by rows with
    MatMul.

    ONNX Runtime's Mul takes three times as long if it repeats both of its factors.
    """
    for node in list(graph):
        if node.op_type == "Mul" and (factors := _in_order(node)):
            new = _Before(graph, node)
            first, second, third = factors
            product = new.value("Mul", [first, second], broadcast(first, second))
            new.replace(new.value("Mul", [product, third], sizes_of(node.outputs[0])))
    for node in list(graph):
        if node.op_type == "Mul" and node.outputs[0].dtype == ir.DataType.FLOAT:
            new = _Before(graph, node)
            for column, row in (node.inputs, node.inputs[::-1]):
                if _is_outer(sizes_of(column), sizes_of(row)):
                    new.replace(new.value("MatMul", [column, row], sizes_of(node.outputs[0])))
                    break


@dataclass
class _Before:
    """Adds nodes before one that they replace; their outputs have the element type of its output."""

    graph: ir.Graph
    node: ir.Node

    def value(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        sizes: Sequence[int | str] | None,
        **attributes: Any,
    ) -> ir.Value:
        """The output of a new node."""
        made = ir.node(op_type, inputs, attributes)
        made.outputs[0].type = self.node.outputs[0].type
        made.outputs[0].shape = None if sizes is None else ir.Shape(sizes)
        self.graph.insert_before(self.node, made)
        return made.outputs[0]

    def numbers(self, name: str, values: Sequence[Any]) -> ir.Value:
        return constant(self.graph, f"{name}.{self.node.outputs[0].name}", np.array(values, np.int64))

    def view(self, value: ir.Value | None, sizes: Sequence[Any]) -> ir.Value:
        """A constant in another shape, which ONNX Runtime computes when it loads the graph."""
        assert value is not None
        return self.value("Reshape", [value, self.numbers(f"shape.{value.name}", sizes)], sizes)

    def replace(self, new: ir.Value) -> None:
        self.node.outputs[0].replace_all_uses_with(new, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)  # what it read may now have one reader


def _depthwise(node: ir.Node) -> tuple[int, int]:
    """The length and the width of a plain convolution of each channel along one axis; zeros for others."""
    x, weight = (sizes_of(value) or () for value in node.inputs[:2]) if node.op_type == "Conv" else ((), ())
    plain = {"pads": {0}, "strides": {1}, "dilations": {1}}
    if (
        len(x) == 3
        and isinstance(x[2], int)
        and weight[:2] == (node.attributes.get_int("group", 1), 1)
        and weight[0] == x[1]
        and all(set(node.attributes.get_ints(name, [])) <= only for name, only in plain.items())
        and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    ):
        return x[2], int(weight[2])
    return 0, 0


def _last(new: _Before, x: ir.Value | None, count: int) -> ir.Value:
    """The last `count` of a tensor [B, C, length]; they may be taken already, for the memory."""
    assert x is not None
    for user, _ in x.uses():
        if _ends(user, count):
            return user.outputs[0]
    bounds = [new.numbers(name, [at]) for name, at in (("from", -count), ("to", 1 << 62), ("along", 2))]
    B, C, _ = sizes_of(x) or ()
    return new.value("Slice", [x, *bounds], [B, C, count])


def _ends(node: ir.Node, count: int) -> bool:
    """Whether a node takes the last `count` of a tensor [B, C, length]."""
    before, after = (sizes_of(value) or () for value in (node.inputs[0], node.outputs[0]))
    if node.op_type != "Slice" or len(after) != 3 or after != (*before[:2], count):
        return False
    start = constant_of(node.inputs[1])
    return start is not None and int(start[-1]) in (-count, int(before[2]) - count)


def _in_order(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """The factors of two products, if there is an order with a smaller first product."""
    for product, third in (node.inputs, node.inputs[::-1]):
        assert product is not None
        inner = product.producer()
        if not inner or inner.op_type != "Mul" or product.is_graph_output() or len(product.uses()) > 1:
            continue
        for first, second in (inner.inputs, inner.inputs[::-1]):
            smaller = broadcast(first, third)
            if smaller and _elements(smaller) < _elements(sizes_of(product)):
                return first, third, second
    return ()


def _elements(sizes: Sizes | None) -> int:
    """The number of elements of one row."""
    return prod(size for size in sizes or () if isinstance(size, int))


def _is_outer(column: Sizes | None, row: Sizes | None) -> bool:
    if not column or not row or len(column) != len(row) or len(row) < 2:
        return False
    return column[:-2] == row[:-2] and column[-1] == row[-2] == 1 and column[-2] != 1 != row[-1]
