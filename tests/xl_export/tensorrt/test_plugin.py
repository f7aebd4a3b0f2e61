"""The plugins' functions through the real `tensorrt.plugin`. `tests/ptx` executes the kernels that TensorRT
receives.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes.base.errors import ConfigError, MissingPackageError
from runtimes.contract.engine import Gpu
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from tests.ptx.driver import EmulatedDriver, execute
from tests.ptx.program import parse
from tests.xl_export.tensorrt.bindings import needs_bindings
from xl_export.tensorrt.kernels.cases import Case
from xl_export.tensorrt.kernels.compile import JOINS, Type, parts, scratch_rows, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, naive_answer
from xl_export.tensorrt.network import take_plugins
from xl_export.tensorrt.operator import DOMAIN, JOIN, PLUGIN, SIGNATURES, Attributes, Signature
from xl_export.tensorrt.plugin import refuse_unfit

pytest.importorskip("triton", reason="triton is not installed (it is for Linux on x86-64 and Arm)")
WORKER = Path(__file__).parent / "plugin_worker.py"
SIZES = {"B": 2, "H": 2, "T": 17, "J": 537, "M": 520, "K": 24, "R": 33, "N": 5}  # two parts
RULE = MemoryRule(mem_len=SIZES["M"], segment=SIZES["T"])
ROWS = [SIZES[letter] for letter in "BHT"]
GPU = {"multiprocessors": 4}  # as in the worker
GPU_OF_8_7 = Gpu(name="A GPU", compute_capability="8.7")


@pytest.fixture(
    scope="module",
    params=[("8.6", "HALF", "front"), pytest.param(("7.5", "FLOAT", "single"), marks=pytest.mark.slow)],
)
def answers(request: pytest.FixtureRequest, bindings: Callable[..., str]) -> dict[str, Any]:
    capability, kind, layout = request.param
    code = f"import runpy\nsys.argv[0] = {str(WORKER)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    attributes = json.dumps(asdict(Attributes.of(RULE, persistent=5)))
    said = bindings(code, capability, kind, json.dumps(SIZES), attributes, layout=layout)
    document: dict[str, Any] = json.loads(said.splitlines()[-1])
    return document | {"kind": kind, "capability": capability}


both_forms = pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)


@needs_bindings
@both_forms
def test_plugins_have_the_attributes_of_the_nodes(answers: dict[str, Any], signature: Signature) -> None:
    every = {**asdict(Attributes.of(RULE)), "mem_len": RULE.mem_len}
    values = {name: every[name] for name in signature.attributes}
    node = onnx.helper.make_node(signature.name, signature.inputs, ["answer"], domain=DOMAIN, **values)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "one", [], []))
    assert take_plugins(model) == 1
    assert [node.op_type for node in model.graph.node] == [signature.parts, JOIN]
    for node in model.graph.node:
        assert node.domain == DOMAIN
        attributes = {
            attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        assert {name: attributes.pop(name).decode() for name in PLUGIN} == PLUGIN
        assert attributes in ({}, values)
        assert set(attributes) == set(answers[node.op_type]["fields"])
        assert len(node.output) == len(answers[node.op_type]["output_types"])
    parts, join = model.graph.node
    assert list(parts.input) == list(signature.inputs)
    assert (list(join.input), list(join.output)) == (["query", "key", *parts.output], ["answer"])


@needs_bindings
def test_the_answer_has_the_shape_and_type_of_the_query(answers: dict[str, Any]) -> None:
    assert answers[JOIN]["output_types"] == [answers["kind"]]
    assert answers[JOIN]["output_shapes"] == [[SIZES[letter] for letter in "BHTK"]]


@needs_bindings
@both_forms
def test_parts_are_float32_and_have_room(answers: dict[str, Any], signature: Signature) -> None:
    rows = scratch_rows(*ROWS, **GPU)
    assert answers[signature.parts]["output_types"] == ["FLOAT", "FLOAT"]
    assert answers[signature.parts]["output_shapes"] == [[rows, SIZES["K"]], [rows]]
    assert rows >= parts(*ROWS, SIZES["J"], **GPU) * np.prod(ROWS)


@needs_bindings
@both_forms
def test_one_type_and_plain_layouts_are_asked_for(answers: dict[str, Any], signature: Signature) -> None:
    integers, found = ("first", "slot"), answers[signature.parts]
    expected = ["INT32" if name in integers else answers["kind"] for name in signature.inputs]
    assert found["combination"] == [*expected, "FLOAT", "FLOAT"]
    assert answers[JOIN]["combination"] == [*[answers["kind"]] * 2, "FLOAT", "FLOAT", answers["kind"]]
    assert found["formats"] == answers[JOIN]["formats"] == ["LINEAR"]


@needs_bindings
def test_every_tactic_launches_a_compiled_kernel_over_the_whole_answer(answers: dict[str, Any]) -> None:
    rows, number = np.prod(ROWS), parts(*ROWS, SIZES["J"], **GPU)
    assert number > 1
    dtype: Type = "float16" if answers["kind"] == "HALF" else "float32"
    offered = tactics(SIZES["K"], int(answers["capability"].replace(".", "")), dtype)
    over_memory, over_ring = (signature.parts for signature in SIGNATURES)
    for name, known, tried in ((over_memory, offered, 2), (over_ring, offered, 1), (JOIN, JOINS, 2)):
        launches = answers[name]["launches"]
        assert answers[name]["tactics"] == list(range(1, len(known) + 1))
        assert len(launches) == tried
        for launch in launches:
            tactic = known[launch["tactic"] - 1]
            grid, integers = (launch["grid_x"], launch["grid_y"], launch["grid_z"]), launch["integers"]
            if name != JOIN:
                assert grid == (SIZES["B"] * SIZES["H"], -(-SIZES["T"] // tactic.block_t), number)
                assert integers == [SIZES["T"], SIZES["J"]]
            else:
                assert grid == (-(-rows // tactic.block_t), 1, 1)
                assert integers == [rows, number]
            assert launch["name"] == tactic.kernel
            assert (launch["block_x"], launch["block_y"], launch["block_z"]) == (32 * tactic.warps, 1, 1)
            assert 0 <= launch["shared_mem"] <= 48 << 10


@needs_bindings
def test_the_chosen_tactic_alone_is_offered_at_its_shape(answers: dict[str, Any]) -> None:
    ring, join = (answers[name]["tactics"] for name in (SIGNATURES[1].parts, JOIN))
    assert answers["chosen"]["at its shape"] == [ring[-1:], join[-1:]]
    assert answers["chosen"]["at another shape"] == [ring, join]


@needs_bindings
def test_the_kernels_take_inputs_two_integers_and_the_outputs(answers: dict[str, Any]) -> None:
    attends = ((signature.parts, len(signature.inputs), 2) for signature in SIGNATURES)
    for name, inputs, outputs in (*attends, (JOIN, 4, 1)):
        for launch in answers[name]["launches"]:
            entry = re.search(rf"\.entry {launch['name']}\((.*?)\)", launch["ptx"], re.S)
            assert entry, launch["ptx"][:200]
            kinds = re.findall(r"\.param \.(\w+)", entry[1])
            assert kinds == ["u64"] * inputs + ["u32", "u32"] + ["u64"] * outputs
            assert f".target sm_{answers['capability'].replace('.', '')}" in launch["ptx"]


@needs_bindings
@both_forms
def test_what_tensorrt_receives_computes_the_naive_operator(
    answers: dict[str, Any], signature: Signature
) -> None:
    """The first tactic with every join, and every tactic with the first join."""
    case = Case(
        **{letter: SIZES[letter] for letter in "BHTMKRN"},
        first=(600, 3),
        slot=(520, 7) if "slot" in signature.inputs else (),
        persistent=5,
        dtype="float16" if answers["kind"] == "HALF" else "float32",
    )
    assert case.attributes == Attributes.of(RULE, persistent=5)
    expected = naive_answer(case)
    attends = answers[signature.parts]
    joins = answers[JOIN]["launches"]
    for n, launch in enumerate(attends["launches"]):
        for join in joins if n == 0 else joins[:1]:
            driver = EmulatedDriver(80, multiprocessors=1)
            inputs = [driver.upload(array) for array in case.inputs().values()]
            scratch = [driver.empty(4 * int(np.prod(shape))) for shape in attends["output_shapes"]]
            answer = np.empty((case.B, case.H, case.T, case.K), case.dtype)
            out = driver.empty(answer.nbytes)
            for made, tensors, outputs in ((launch, inputs, scratch), (join, [*inputs[:2], *scratch], [out])):
                execute(
                    parse(made["ptx"], made["name"]),
                    [*tensors, *made["integers"], *outputs],
                    grid=(made["grid_x"], made["grid_y"], made["grid_z"]),
                    shared_bytes=made["shared_mem"],
                    memory=driver.memory,
                )
            driver.download(answer, out)
            assert np.abs(answer - expected).max() <= TOLERANCES[case.dtype]


def test_models_that_the_kernel_lacks_are_refused_early(artefacts: dict[str, Path]) -> None:
    spec = load_spec(artefacts["shift"])
    refuse_unfit(spec, GPU_OF_8_7, version="11.4.0.106")
    with pytest.raises(ConfigError, match=r"Old has compute capability 6\.1.* give --attention native"):
        refuse_unfit(spec, Gpu(name="Old", compute_capability="6.1"), version="11.4.0.106")
    wide = dataclasses.replace(spec, model=dataclasses.replace(spec.model, head_dim=192))
    with pytest.raises(ConfigError, match="heads are 192 wide"):
        refuse_unfit(wide, GPU_OF_8_7, version="11.4.0.106")


@pytest.mark.parametrize(
    ("version", "numpy", "fits"),
    [
        ("10.15.1.29", "2.4.0", False),
        ("11.1.0.106", "2.10.1", False),
        ("11.1.0.106", "2.3.5", True),
        ("11.2.1.2", "2.4.6", True),
    ],
)
def test_a_numpy_that_tensorrts_plugins_cannot_use_is_refused_early(
    version: str, numpy: str, fits: bool, artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(artefacts["shift"])
    monkeypatch.setattr(np, "__version__", numpy)
    if fits:
        return refuse_unfit(spec, GPU_OF_8_7, version=version)
    with pytest.raises(
        MissingPackageError, match=rf"TensorRT {version}, and {numpy} is installed; .*numpy<2"
    ):
        refuse_unfit(spec, GPU_OF_8_7, version=version)
