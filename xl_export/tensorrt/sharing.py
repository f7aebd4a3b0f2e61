"""Attention made of its function body, with what all layers have in common computed once.

A body works out distances, mask and rows of tables, so a parser that inlines it does so in every layer. All
bodies take sizes from the same values (see `operator.py`), so these nodes are equal.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner

from xl_export.tensorrt.operator import DOMAIN, SIGNATURES

NAMES = {signature.name for signature in SIGNATURES}


def inline_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the bodies of attentions in place of their nodes, and without equal computations.

    Values and weights of the graph keep their names. A model without attention nodes is returned unchanged.
    """
    if not any(node.domain == DOMAIN and node.op_type in NAMES for node in model.graph.node):
        return model
    inlined = onnx.inliner.inline_local_functions(model)
    sizes = {weight.name: tuple(weight.dims) for weight in inlined.graph.initializer}
    for node in inlined.graph.node:
        if node.op_type == "Shape" and not node.domain and node.input[0] in sizes:
            part = {item.name: item.i for item in node.attribute}
            _become_constant(node, sizes[node.input[0]][part.get("start", 0) : part.get("end")])
    _merge_equal(inlined.graph)
    return inlined


def _become_constant(node: onnx.NodeProto, sizes: tuple[int, ...]) -> None:
    constant = onnx.numpy_helper.from_array(np.array(sizes, np.int64))
    node.CopyFrom(onnx.helper.make_node("Constant", [], node.output, name=node.name, value=constant))


def _merge_equal(graph: onnx.GraphProto) -> None:
    """Removes nodes that compute what an earlier node computes."""
    kept = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    earlier: dict[tuple[object, ...], onnx.NodeProto] = {}
    nodes = []
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        attributes = sorted(item.SerializeToString() for item in node.attribute)
        key = (node.domain, node.op_type, *node.input, *attributes)
        if key in earlier and not kept & set(node.output):
            renamed.update(zip(node.output, earlier[key].output, strict=True))
        else:
            earlier.setdefault(key, node)
            nodes.append(node)
    merged = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(merged)
