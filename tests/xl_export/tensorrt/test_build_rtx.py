"""TensorRT-RTX parses and builds the graph of every architecture, without a GPU. Nothing that it builds is
run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.engine import Profile
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import Form
from runtimes.sessions.tensorrt.module import fresh_log
from tests.architectures import ARCHITECTURES
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import form_for, make_spec
from xl_export.artefact.write import finite_arrays
from xl_export.graph.ops import save_model
from xl_export.tensorrt.build import configure, optimization_profile, serialize
from xl_export.tensorrt.graph import tensorrt_graph
from xl_export.tensorrt.network import Parsed, allow_decomposition, parse
from xl_export.tensorrt.options import BuildOptions

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
OPTIONS = BuildOptions(flavour="rtx", compute_capabilities=("8.6",), batch=(1, 2, 4))
PRODUCTS = {"MATRIX_MULTIPLY"}
STATISTICS = {"NORMALIZATION", "SOFTMAX", "ATTENTION_INPUT", "ATTENTION_OUTPUT"}
IN_SINGLE = STATISTICS | {
    "CAST",
    "CONSTANT",
    "SHUFFLE",
}  # layers that may be in float32, where attention is one layer
OF_LOGARITHMS = {
    "ELEMENTWISE",
    "UNARY",
    "REDUCE",
    "SELECT",
    "CONCATENATION",
    "SLICE",
    "SQUEEZE",
}  # and where sums of exponentials are
# Building takes seconds each.
BUILT = (("transformer-xl", "native"), ("adaptive-softmax", "plugin"))
BODIES_BUILT = ("transformer-xl", "adaptive-softmax", "all-attention-groups")
GRAPHS = [
    pytest.param(name, attention, marks=() if (name, attention) in BUILT else pytest.mark.slow)
    for name in ARCHITECTURES
    for attention in ("native", "plugin")
]


@pytest.fixture(scope="module")
def graphs(
    make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Spec, Path]]:
    """`graphs(name, attention, form)` → the spec and the folder with the float16 graph of a small model.

    Without a form it is the one that an export takes.
    """
    runs: dict[str, Any] = {}

    def make(name: str, attention: str, form: Form | None = None) -> tuple[Spec, Path]:
        if name not in runs:
            runs[name] = load_run(make_run(**{"head_dim": 16, **ARCHITECTURES[name]}))
        run = runs[name]
        rule = run.config.evaluation
        chosen = form_for("tensorrt", form, rule, run.config.model, "graph")
        spec = make_spec(run, rule, chosen, "tensorrt", "fp16", "fp16")
        folder = tmp_path_factory.mktemp("graph")
        # type: ignore[arg-type]
        graph = tensorrt_graph(spec, run.config.model, finite_arrays(run.model), attention=attention)
        save_model(graph, folder)
        return spec, folder

    return make


def parsed_network(folder: Path) -> Parsed:
    return parse(trt, fresh_log(trt), folder, attention="native", name="TensorRT-RTX")


@pytest.mark.parametrize(("name", "attention"), GRAPHS)
def test_the_graph_of_every_architecture_becomes_a_plan(graphs: Callable, name: str, attention: str) -> None:
    spec, folder = graphs(name, attention)
    parsed = parsed_network(folder)
    network = parsed.network
    inputs, outputs = (
        {tensor.name: (tensor.dtype.name, tuple(tensor.shape)) for tensor in map(get, range(count))}
        for get, count in ((network.get_input, network.num_inputs), (network.get_output, network.num_outputs))
    )
    names = {"int64": "INT64", "float32": "FLOAT", "float16": "HALF"}
    for found, promised in ((inputs, spec.inputs), (outputs, spec.outputs)):
        shapes = {
            fact.name: tuple(size if isinstance(size, int) else -1 for size in fact.shape)
            for fact in promised
        }
        assert found == {fact.name: (names[fact.dtype], shapes[fact.name]) for fact in promised}
    fused = attention == "native" and spec.model.sublayers != "all-attention"
    kinds = [
        (layer.type.name, layer.get_output(0).dtype.name)
        for layer in map(network.get_layer, range(network.num_layers))
    ]
    assert {dtype for kind, dtype in kinds if kind in PRODUCTS} == {"HALF"}
    assert {dtype for kind, dtype in kinds if kind in STATISTICS} == {"FLOAT"}
    for layer in map(network.get_layer, range(network.num_layers)):
        given, made = (
            float_types(layer.num_inputs, layer.get_input),
            float_types(layer.num_outputs, layer.get_output),
        )
        assert len(given | made) <= 1 or layer.type.name in ("CAST", "ATTENTION_INPUT"), (
            f"{layer.name} has inputs and outputs of {given | made}"
        )
        if "FLOAT" in made:
            logarithms = attention == "plugin" or spec.model.cutoffs
            # The parser multiplies queries and keys of Attention by its scale, which is 1.
            others = OF_LOGARITHMS if logarithms else {"ELEMENTWISE"} if fused else set()
            assert layer.type.name in IN_SINGLE | others, layer.name
    assert not {"PLUGIN", "PLUGIN_V2", "PLUGIN_V3"} & parsed.layers.keys()
    assert parsed.layers.get("ATTENTION_INPUT", 0) == (len(spec.state) // 2 if fused else 0)
    assert parsed.layers.get("KV_CACHE_UPDATE", 0) == (len(spec.state) if spec.form == "ring" else 0)
    assert sum(parsed.layers.values()) == network.num_layers
    if attention == "native" or name in BODIES_BUILT:
        plan = bytes(plan_of(parsed, spec))
        assert len(plan) > 10_000
        # The names of NVIDIA's kernels for attention say in which type they sum. It has none for one head.
        sums = {b"hmma_fp32_traits"} if fused and spec.state[0].shape[1] != 1 else set()
        assert set(re.findall(rb"hmma_fp\d\d_traits", plan)) == sums


@pytest.mark.parametrize(("version", "bias"), [("11.2.1.10", "FLOAT"), ("11.3.0.14", "HALF")])
def test_the_bias_of_attention_has_the_type_that_tensorrt_needs(
    graphs: Callable, version: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = graphs("transformer-xl", "native")
    monkeypatch.setattr(trt, "__version__", version)
    network = parse(trt, fresh_log(trt), folder, attention="native", name="TensorRT").network
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    assert [
        [layer.get_input(at).dtype.name for at in range(4)]
        for layer in layers
        if layer.type.name == "ATTENTION_INPUT"
    ] == [["FLOAT", "FLOAT", "FLOAT", bias]] * 2


def test_an_attention_layer_of_the_base_class_becomes_decomposable() -> None:
    """The mark is set on the layer itself, as any later look at it shows."""
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network()
    query, key, value = (network.add_input(name, trt.float16, (1, 2, 8, 16)) for name in "qkv")
    attention = network.add_attention(query, key, value, trt.AttentionNormalizationOp.SOFTMAX, False)
    assert not attention.decomposable
    allow_decomposition(trt, [network.get_layer(index) for index in range(network.num_layers)])
    assert attention.decomposable


@pytest.mark.slow
def test_a_ring_has_fewer_layers_and_half_the_bytes(graphs: Callable) -> None:
    """The memory is long against the segment, as in use. Both plans have two profiles."""
    sizes = {}
    for form in ("ring", "shift"):
        spec, folder = graphs("all-attention-groups", "native", form)
        parsed = parsed_network(folder)
        assert parsed.layers.get("KV_CACHE_UPDATE", 0) == (len(spec.state) if form == "ring" else 0)
        nbytes = plan_of(parsed, spec).nbytes
        sizes[form] = (sum(parsed.layers.values()), spec.running_bytes_per_stream, nbytes)
    assert sizes["ring"][0] < 0.7 * sizes["shift"][0]
    assert sizes["ring"][1] < 0.6 * sizes["shift"][1]
    assert sizes["ring"][2] < 1.05 * sizes["shift"][2]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in BODIES_BUILT])
def test_the_function_body_of_every_other_architecture_becomes_a_plan(graphs: Callable, name: str) -> None:
    spec, folder = graphs(name, "plugin")
    assert plan_of(parsed_network(folder), spec).nbytes > 10_000


def plan_of(parsed: Parsed, spec: Spec) -> Any:
    return serialize(trt, fresh_log(trt), parsed, spec, OPTIONS.profiles(spec.rule), OPTIONS)


def float_types(count: int, get: Callable[[int], Any]) -> set[str]:
    """Of a layer's inputs, or of its outputs."""
    return {tensor.dtype.name for tensor in map(get, range(count)) if tensor is not None} & {"HALF", "FLOAT"}


def test_the_profiles_are_those_that_were_asked_for(graphs: Callable) -> None:
    spec, folder = graphs("adaptive-softmax", "native")
    parsed = parsed_network(folder)
    segment, token = OPTIONS.profiles(spec.rule)
    assert (segment.batch, segment.tokens) == ((1, 2, 4), (1, 8, 8))
    assert (token.batch, token.tokens) == ((1, 2, 4), (1, 1, 1))
    config = parsed.builder.create_builder_config()
    for profile, rows in ((segment, (1, 2, 32)), (token, (1, 2, 4))):
        made = optimization_profile(parsed.builder, spec, profile)
        ids, wanted, keys = (
            [tuple(size) for size in made.get_shape(name)]
            for name in ("input_ids", "logit_rows", "past_key_values.0.key")
        )
        assert ids == list(zip(profile.batch, profile.tokens, strict=True))
        assert wanted == [(size,) for size in rows]
        assert keys == [(size, 2, spec.rule.slots, 16) for size in profile.batch]
        assert config.add_optimization_profile(made) >= 0
    assert config.num_optimization_profiles == 2


def test_options_reach_the_configuration(graphs: Callable) -> None:
    spec, folder = graphs("transformer-xl", "native")
    config = parsed_network(folder).builder.create_builder_config()
    options = BuildOptions(
        flavour="rtx", compute_capabilities=("8.9", "12.0"), workspace_mib=64, optimization_level=2
    )
    configure(trt, config, spec, options)
    assert config.get_flag(trt.BuilderFlag.TF32)  # float16 products are what they are
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert [config.get_compute_capability(at).name for at in range(config.num_compute_capabilities)] == [
        "SM89",
        "SM120",
    ]
    single = dataclasses.replace(spec, precision="fp32")
    configure(trt, config, single, BuildOptions(refit=True, version_compatible=True))
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert config.get_flag(trt.BuilderFlag.REFIT)
    assert config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def test_every_node_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23, "other" : 1]>
    step (float[2] x) => (float[2] y) { a = other.First (x) \n b = other.Second (a) \n y = Add (a, b) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "step.onnx")
    with pytest.raises(
        ArtefactError,
        match=r"step\.onnx cannot be parsed by TensorRT-RTX .*node \d First .*node \d Second .*\.$",
    ):
        parsed_network(tmp_path)


def test_a_library_that_does_not_start_is_said_so(graphs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(log: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    _, folder = graphs("transformer-xl", "native")
    monkeypatch.setattr(trt, "Builder", nothing)
    with pytest.raises(
        ArtefactError, match=r"cannot start here \(it gave no reason\); update the GPU's driver"
    ):
        parsed_network(folder)


def test_a_plugin_needs_a_node_in_the_graph(graphs: Callable) -> None:
    _, folder = graphs("transformer-xl", "native")
    with pytest.raises(
        ConfigError,
        match=r"no node xl_export::RelativeAttention.*export --target tensorrt --attention-as node`",
    ):
        parse(trt, fresh_log(trt), folder, attention="plugin", name="TensorRT")


def test_impossible_shapes_are_refused_with_tensorrts_reason(graphs: Callable) -> None:
    spec, folder = graphs("transformer-xl", "native")
    broken = dataclasses.replace(spec.state[0], shape=("batch", 2, 16, 17))
    wrong = dataclasses.replace(spec, inputs=(*spec.inputs[:2], broken, *spec.inputs[3:]))
    profiles = (Profile(name="segment", batch=(1, 1, 1), tokens=(1, 8, 8)),)
    with pytest.raises(ArtefactError, match=r"could not build the engine \(.+\); give a smaller --batch"):
        serialize(trt, fresh_log(trt), parsed_network(folder), wrong, profiles, OPTIONS)
