"""The graph of an artefact as a TensorRT network: attention assigned to plugins or not, every refused node
named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.engine import NAMES, Attention
from runtimes.contract.spec import GRAPH
from xl_export.tensorrt.operator import DOMAIN, JOIN, NAME, PLUGIN, SIGNATURES
from xl_export.tensorrt.progress import held_interrupt

# The first releases that compute Attention between casts (see `half.py`) in one kernel.
SUMS_IN_SINGLE = {NAMES["tensorrt"]: (11, 3), NAMES["rtx"]: (1, 7)}


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A network, the objects that keep it alive, and its counts: layers by kind, their first outputs by
    type.
    """

    builder: Any
    network: Any
    parser: Any
    layers: dict[str, int]
    types: dict[str, int]
    plugin_layers: int


def parse(trt: Any, log: Any, folder: Path, *, attention: Attention, name: str) -> Parsed:
    """The network of an artefact's `step.onnx`, with the types that the graph has (it is strongly typed).

    name: of this TensorRT in errors. Raises ConfigError if the plugin is requested and the graph has no
    attention for it. Raises ArtefactError with every node that this TensorRT does not know, and if the number
    of plugin layers is not the one that the graph's attention needs.
    """
    graph = folder / GRAPH
    model = read_model(graph)
    attentions = 0
    if attention == "plugin":
        attentions = take_plugins(model)
    else:
        model = native_attention(model, name, trt.__version__)
    if attention == "plugin" and not attentions:
        raise ConfigError(
            f"{graph} has no node {DOMAIN}::{NAME}, which --attention plugin needs; export the artefact with "
            "`xl-export export --target tensorrt --attention-as node`, or build with --attention native."
        )
    try:
        builder = trt.Builder(log)
    except TypeError as error:  # what the bindings make of a null pointer
        raise ArtefactError(
            f"{name} {trt.__version__} cannot start here ({log.last_error()}); update the GPU's driver."
        ) from error

    # Releases differ in their flags: TensorRT-RTX has none for plugins, since its Python package does not
    # support them.
    kinds = trt.NetworkDefinitionCreationFlag
    flags = [getattr(kinds, flag, None) for flag in ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS")]
    network = builder.create_network(sum(1 << int(flag) for flag in flags if flag is not None))
    parser = trt.OnnxParser(network, log)
    # The model itself is passed as bytes, since its nodes were changed; the parser finds the weights' file by
    # the path.
    with held_interrupt():
        parsed = parser.parse(model.SerializeToString(), str(graph.resolve()))
    if not parsed:
        raise ArtefactError(
            f"{graph} cannot be parsed by {name} {trt.__version__}: "
            f"{parser_errors(parser) or log.last_error()}."
        )

    layers = [network.get_layer(index) for index in range(network.num_layers)]
    allow_decomposition(trt, layers)
    layer_counts = Counter(layer.type.name for layer in layers)
    # A parser that does not find a plugin could use the node's function body instead. That must not pass
    # unnoticed.
    plugin_layers = layer_counts["PLUGIN_V3"]
    if plugin_layers != 2 * attentions:
        raise ArtefactError(
            f"{name} {trt.__version__} made {plugin_layers} plugin layers where {2 * attentions} are "
            "needed, two for each attention; build with --attention native, and report this."
        )
    types = Counter(layer.get_output(0).dtype.name for layer in layers if layer.num_outputs)
    return Parsed(
        builder=builder,
        network=network,
        parser=parser,
        layers=dict(layer_counts),
        types=dict(types),
        plugin_layers=plugin_layers,
    )


def read_model(graph: Path) -> onnx.ModelProto:
    """The ONNX model of a file without its weights."""
    return onnx.load(graph, load_external_data=False)


def native_attention(model: onnx.ModelProto, name: str, version: str) -> onnx.ModelProto:
    """The model with attention as a TensorRT of this name and version computes it best by itself."""
    model = inline_attention(model)
    if release(version) >= SUMS_IN_SINGLE[name]:
        expose_casts(model.graph)
    return model


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def expose_casts(graph: onnx.GraphProto) -> None:
    """Changes, in place, what keeps TensorRT from computing Attention between casts in one kernel.

    The bias stays float16: TensorRT removes the casts of queries, keys and values, and then finds a bias of
    another type. And a reshape that changes nothing precedes the casts of keys and values, since TensorRT
    does not find casts that directly follow the update of a ring. Otherwise TensorRT-RTX 1.7 fails or crashes
    while it builds.
    """
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    keys_and_values = {name for node in attentions for name in node.input[1:3]}
    biases = {name for node in attentions for name in node.input[3:]}
    in_half = {x.name for x in graph.value_info if x.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    # A traced module may cast integers to its mask.
    halves = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Cast" and node.output[0] in biases and node.input[0] in in_half
    }
    same_shape = "xl_export.same_shape"
    graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(4, np.int64), same_shape))
    nodes = []
    for node in graph.node:
        if node.op_type == "Cast" and node.output[0] in keys_and_values:
            reshaped = f"{node.output[0]}.reshaped"
            nodes.append(onnx.helper.make_node("Reshape", [node.input[0], same_shape], [reshaped]))
            node.input[0] = reshaped
        node.input[:] = [halves.get(name, name) for name in node.input]
        if node.output[0] not in halves:
            nodes.append(node)
    changed = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(changed)


def allow_decomposition(trt: Any, layers: Iterable[Any]) -> None:
    """Lets TensorRT run an attention as products and a softmax if it has no fused kernel for its sizes or
    types.

    Changes the layers of a parsed network, by a part of TensorRT's Python bindings which their documentation
    does not promise. `INetworkDefinition.get_layer` returns the base class `ILayer`,
    which has no property `attention`; the underlying object is the right one. So the class of the Python
    object is replaced.
    """
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)  # older releases have no such layer
    for layer in layers:
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def inline_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the bodies of attentions in place of their nodes, and without equal computations.

    A body works out distances, mask and rows of tables, so a parser that inlines it does so in every layer.
    All bodies take sizes from the same values (see `operator.py`), so these nodes are equal. Values and
    weights of the graph keep their names. A model without attention nodes is returned unchanged.
    """
    names = {signature.name for signature in SIGNATURES}
    if not any(node.domain == DOMAIN and node.op_type in names for node in model.graph.node):
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


def take_plugins(model: onnx.ModelProto) -> int:
    """Replaces every attention by the nodes of the two plugins, in place; returns how many attentions there
    were.
    """
    nodes = onnx.GraphProto().node
    count = 0
    signatures = {(DOMAIN, signature.name): signature for signature in SIGNATURES}
    for node in model.graph.node:
        signature = signatures.get((node.domain, node.op_type))
        if signature is None:
            nodes.append(node)
            continue
        inputs = node.input[: len(signature.inputs)]
        answer = node.output[0]
        of_parts = [f"{answer}.mixed", f"{answer}.level"]
        attributes = {item.name: item.i for item in node.attribute if item.name in signature.attributes}
        options = {"domain": DOMAIN, **PLUGIN}
        nodes.append(
            onnx.helper.make_node(
                signature.parts, inputs, of_parts, name=f"{node.name}.parts", **options, **attributes
            )
        )
        nodes.append(
            onnx.helper.make_node(
                JOIN, [*node.input[:2], *of_parts], [answer], name=f"{node.name}.join", **options
            )
        )
        count += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def parser_errors(parser: Any) -> str:
    """Every error of a parser with its node, as parts of one sentence."""
    sentences = []
    for index in range(parser.num_errors):
        parser_error = parser.get_error(index)
        operator = parser_error.node_operator()
        where = (
            f"node {parser_error.node()} {operator} ({parser_error.node_name()})" if operator else "the graph"
        )
        sentences.append(f"{where}: {' '.join(parser_error.desc().split()).rstrip('.')}")
    return "; ".join(sentences)
