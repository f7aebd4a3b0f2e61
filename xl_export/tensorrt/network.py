"""ARTEFACT's graph → TensorRT network: every node parsed or named in an error, attention assigned, layers counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from runtimes.base.errors import ArtefactError, ConfigError, first_line
from runtimes.contract.engine import Attention
from runtimes.contract.spec import GRAPH
from xl_export.tensorrt.operator import ATTRIBUTES, DOMAIN, INPUTS, JOIN, NAME, PARTS, PLUGIN


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A network with what keeps it alive, and what it holds: layers by kind, and their output tensors by type."""

    builder: Any
    network: Any
    parser: Any
    layers: dict[str, int]
    types: dict[str, int]
    plugin_layers: int


def parse(trt: Any, log: Any, folder: Path, *, attention: Attention, name: str) -> Parsed:
    """The network of an artefact's `step.onnx`. Its types are the graph's: networks are strongly typed.

    Raises ArtefactError with every node that this TensorRT cannot take, ConfigError where the graph has no attention that
    the plugin could take; ArtefactError too where it did not take every one of them.
    """
    graph = folder / GRAPH
    try:
        model = onnx.load(graph, load_external_data=False)
    except DecodeError as error:
        raise ArtefactError(
            f"{graph} is not an ONNX model ({first_line(error)}); export it again."
        ) from error
    relative = take_plugins(model) if attention == "plugin" else 0
    if attention == "plugin" and not relative:
        raise ConfigError(
            f"{graph} has no {DOMAIN}::{NAME}, which the plugin takes; export it with `xl-export export --target tensorrt`, "
            "or give --attention native."
        )
    try:
        builder = trt.Builder(log)
    except TypeError as error:  # what the bindings make of a null pointer
        raise ArtefactError(
            f"{name} {trt.__version__} cannot start here ({log.last_error()}); update the GPU's driver."
        ) from error
    kinds = trt.NetworkDefinitionCreationFlag
    wanted = [getattr(kinds, flag, None) for flag in ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS")]
    network = builder.create_network(sum(1 << int(flag) for flag in wanted if flag is not None))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(
        model.SerializeToString(), str(graph.resolve())
    ):  # the path finds the weights beside it
        raise ArtefactError(
            f"{graph} cannot be parsed by {name} {trt.__version__}: {parser_errors(parser) or log.last_error()}."
        )
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    make_decomposable(trt, layers)
    counted = Counter(layer.type.name for layer in layers)
    taken = counted["PLUGIN_V3"]
    if taken != 2 * relative:
        raise ArtefactError(
            f"{name} {trt.__version__} made {taken} plugin layers where {2 * relative} are needed, two for each attention; "
            "give --attention native, and report this."
        )
    types = Counter(layer.get_output(0).dtype.name for layer in layers if layer.num_outputs)
    return Parsed(
        builder=builder, network=network, parser=parser, layers=dict(counted), types=dict(types), plugin_layers=taken
    )  # fmt: skip


def take_plugins(model: onnx.ModelProto) -> int:
    """Puts the two plugins in the place of every attention, which would else be its function body; returns their number."""
    nodes, count = onnx.GraphProto().node, 0
    for node in model.graph.node:
        if (node.domain, node.op_type) != (DOMAIN, NAME):
            nodes.append(node)
            continue
        if len(node.input) != len(INPUTS) or len(node.output) != 1:
            raise ArtefactError(
                f"{DOMAIN}::{NAME} has {len(node.input)} inputs, expected {len(INPUTS)}; export it again."
            )
        answer = node.output[0]
        between = [f"{answer}.mixed", f"{answer}.level"]
        given = {attribute.name: attribute.i for attribute in node.attribute if attribute.name in ATTRIBUTES}
        options = {"domain": DOMAIN, **PLUGIN}
        nodes.append(
            onnx.helper.make_node(PARTS, node.input, between, name=f"{node.name}.parts", **options, **given)
        )
        nodes.append(
            onnx.helper.make_node(
                JOIN, [node.input[0], *between], [answer], name=f"{node.name}.join", **options
            )
        )
        count += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def make_decomposable(trt: Any, layers: list[Any]) -> None:
    """Lets TensorRT run an attention as products and a softmax where it has no fused kernel for its sizes or types."""
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    for layer in layers:
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings hand out the base class
            layer.attention.decomposable = True


def parser_errors(parser: Any) -> str:
    """Every error with its node, as parts of one sentence."""
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        operator = error.node_operator()
        where = f"node {error.node()} {operator} ({error.node_name()})" if operator else "the graph"
        found.append(f"{where}: {' '.join(error.desc().split()).rstrip('.')}")
    return "; ".join(found)
