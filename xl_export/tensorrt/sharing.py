"""Attention made of its function body, with what all layers have in common computed once.

A body works out distances, mask and rows of tables from the shapes of its own queries and keys, so a parser
that inlines it does so in every layer. These shapes are equal in many layers, which no parser can know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx.inliner

from xl_export.tensorrt.operator import DOMAIN, SIGNATURES

NAMES = {signature.name: signature for signature in SIGNATURES}


def inline_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the bodies of attentions in place of their nodes, and without equal computations.

    Values and weights of the graph keep their names. A model without attention nodes is returned unchanged.
    """
    attentions = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in NAMES]
    if not attentions:
        return model
    same = dict(_same_shapes(model.graph, attentions))
    inlined = onnx.inliner.inline_local_functions(model)
    sizes = {weight.name: tuple(weight.dims) for weight in inlined.graph.initializer}
    for node in inlined.graph.node:
        if node.op_type == "Shape" and not node.domain:
            part = {item.name: item.i for item in node.attribute}
            if node.input[0] in sizes:
                _become_constant(node, sizes[node.input[0]][part.get("start", 0) : part.get("end")])
            else:
                axes = part.get("start", 0), part.get("end", 0)
                node.input[0] = same.get((node.input[0], axes), node.input[0])
    _merge_equal(inlined.graph)
    return inlined


def _same_shapes(
    graph: onnx.GraphProto, attentions: list[onnx.NodeProto]
) -> Iterator[tuple[tuple[str, tuple[int, int]], str]]:
    """For each value and axes whose sizes a body reads, the first value that has the same sizes there."""
    makers = {name: node for node in graph.node for name in node.output}
    past = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    weights = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    first: dict[tuple[object, ...], str] = {}
    for node in attentions:
        inputs = dict(zip(NAMES[node.op_type].inputs, node.input, strict=True))
        query, key = inputs["query"], inputs["key"]
        yield (query, (2, 3)), first.setdefault(("T",), query)
        yield (query, (0, 3)), first.setdefault(("BHT", weights[inputs["u"]][0]), query)
        memory = past[_memory(key, makers)][2].dim_value
        yield (key, (2, 3)), first.setdefault(("J", node.op_type, memory), key)


def _memory(key: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    """The graph's input from which the keys of memory and segment are made."""
    while key in makers:
        node = makers[key]
        key = node.input[2 if node.op_type == "Where" else 0]
    return key


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
