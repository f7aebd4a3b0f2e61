"""Removes operators of a traced step that only change the shape of a tensor.

A module that computes one token adds and removes axes of size 1 all the time, and in a small model each
operator costs as much as its arithmetic.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from xl_export.graph.ops import constant
from xl_export.graph.sizes import Sizes, sizes_of


def join_views(graph: ir.Graph) -> None:
    """Reads each view from the tensor that it is a view of, by one Reshape, or without one if its shape is
    that of the tensor or of another view.

    A view has the elements of a tensor in the same order. At most one of its sizes may vary.
    """
    roots: dict[ir.Value, ir.Value] = {}
    made: dict[tuple[ir.Value, Sizes], ir.Value] = {}
    for node in list(graph):
        if not _is_view(node):
            continue
        source, out = node.inputs[0], node.outputs[0]
        assert source is not None
        root = roots.get(source, source)
        sizes = sizes_of(out)
        if sizes is None or 0 in sizes or len([size for size in sizes if isinstance(size, str)]) > 1:
            continue
        roots[out] = root
        same = root if sizes == sizes_of(root) else made.get((root, sizes))
        if same is not None and out not in graph.outputs:
            out.replace_all_uses_with(same)
        elif source is not root or node.op_type in ("Transpose", "Gather"):
            shape = np.array([-1 if isinstance(size, str) else size for size in sizes], np.int64)
            reshape = ir.node("Reshape", [root, constant(graph, f"shape.{out.name}", shape)])
            reshape.outputs[0].type, reshape.outputs[0].shape = out.type, out.shape
            graph.insert_after(node, reshape)
            out.replace_all_uses_with(reshape.outputs[0], replace_graph_outputs=True)
            roots[reshape.outputs[0]] = root
            made[root, sizes] = reshape.outputs[0]
        else:
            made[root, sizes] = out


def _is_view(node: ir.Node) -> bool:
    if node.op_type in ("Squeeze", "Unsqueeze", "Reshape"):
        return True
    sizes = sizes_of(node.inputs[0]) if node.inputs else None
    if sizes is None:
        return False
    if node.op_type == "Transpose":
        moved = [axis for axis in node.attributes.get_ints("perm") if sizes[axis] != 1]
        return moved == sorted(moved)
    if node.op_type == "Gather":
        index = constant_of(node.inputs[1])
        axis = node.attributes.get_int("axis", 0)
        return index is not None and index.ndim == 0 and sizes[axis] == 1
    return False


def drop_softplus_thresholds(graph: ir.Graph) -> None:
    """Computes softplus by one operator, without PyTorch's branch for x > 20, where both give x."""
    for node in list(graph):
        if node.op_type != "Where":
            continue
        above, _, soft = (value and value.producer() for value in node.inputs)
        if not (above and above.op_type == "Greater" and soft and soft.op_type == "Softplus"):
            continue
        limit = constant_of(above.inputs[1])
        if node.inputs[1] is above.inputs[0] is soft.inputs[0] and limit is not None and (limit >= 20).all():
            node.outputs[0].replace_all_uses_with(soft.outputs[0], replace_graph_outputs=True)


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    return value.const_value.numpy() if value is not None and value.const_value is not None else None
