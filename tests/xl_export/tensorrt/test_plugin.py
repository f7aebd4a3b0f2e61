"""The plugin's functions through the real `tensorrt.plugin`, as far as they go without TensorRT: no kernel is launched."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runtimes.engine import Gpu
from runtimes.errors import ConfigError
from runtimes.rule import MemoryRule
from runtimes.spec import load_spec
from tests.xl_export.tensorrt.bindings import needs_bindings
from xl_export.tensorrt.compile import tactics
from xl_export.tensorrt.operator import INPUTS, Attributes
from xl_export.tensorrt.plugin import ATTRIBUTES, capability_number, refuse_unfit

pytest.importorskip("triton", reason="triton is not installed (it is for Linux on x86-64 and Arm)")
WORKER = Path(__file__).parent / "plugin_worker.py"
SIZES = {"B": 3, "H": 4, "T": 33, "J": 97, "K": 24, "R": 65, "N": 5}
RULE = MemoryRule(mem_len=64, segment=33)


@pytest.fixture(scope="module", params=[("8.6", "HALF"), ("7.5", "FLOAT")])
def answers(request: pytest.FixtureRequest, bindings: Callable[..., str]) -> dict[str, Any]:
    capability, kind = request.param
    code = f"import runpy\nsys.argv[0] = {str(WORKER)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    attributes = json.dumps(asdict(Attributes.of(RULE, persistent=5)))
    said = bindings(code, capability, kind, json.dumps(SIZES), attributes)
    document: dict[str, Any] = json.loads(said.splitlines()[-1])
    return document | {"kind": kind, "capability": capability}


@needs_bindings
def test_it_is_registered_with_the_attributes_that_are_on_the_nodes(answers: dict[str, Any]) -> None:
    assert answers["namespace"] == "xl"
    assert answers["fields"] == list(ATTRIBUTES)
    node = Attributes.of(RULE).on_node()
    assert [name for name in node if not name.startswith("plugin_")] == list(ATTRIBUTES)


@needs_bindings
def test_the_answer_has_the_shape_and_type_of_the_query(answers: dict[str, Any]) -> None:
    assert answers["output_types"] == [answers["kind"]]
    assert answers["output_shapes"] == [[SIZES[letter] for letter in "BHTK"]]


@needs_bindings
def test_one_type_and_plain_layouts_are_asked_for(answers: dict[str, Any]) -> None:
    expected = ["INT32" if name == "first" else answers["kind"] for name in INPUTS]
    assert answers["combination"] == [*expected, answers["kind"]]
    assert answers["formats"] == ["LINEAR"]


@needs_bindings
def test_every_tactic_launches_a_compiled_kernel_over_the_whole_answer(answers: dict[str, Any]) -> None:
    known = tactics(SIZES["K"])
    assert [launch["tactic"] for launch in answers["launches"]] == list(range(1, len(known) + 1))
    for tactic, launch in zip(known, answers["launches"], strict=True):
        assert launch["name"] == tactic.kernel
        assert launch["integers"] == [SIZES["T"], SIZES["J"]]
        assert (launch["grid_x"], launch["grid_z"]) == (SIZES["B"] * SIZES["H"], 1)
        assert launch["grid_y"] * tactic.block_t >= SIZES["T"] > (launch["grid_y"] - 1) * tactic.block_t
        assert (launch["block_x"], launch["block_y"], launch["block_z"]) == (32 * tactic.warps, 1, 1)
        assert 0 <= launch["shared_mem"] <= 48 << 10


@needs_bindings
def test_the_kernels_take_inputs_two_integers_and_the_answer(answers: dict[str, Any]) -> None:
    for launch in answers["launches"]:
        ptx = launch["ptx"]
        entry = re.search(rf"\.entry {launch['name']}\((.*?)\)", ptx, re.S)
        assert entry, ptx[:200]
        kinds = re.findall(r"\.param \.(\w+)", entry[1])
        assert kinds == ["u64"] * len(INPUTS) + ["u32", "u32", "u64"]
        assert f".target sm_{answers['capability'].replace('.', '')}" in ptx


def test_capabilities_are_numbers() -> None:
    assert capability_number(Gpu(name="", compute_capability="12.0")) == 120


def test_what_the_kernel_cannot_serve_is_refused_before_tensorrt_is_asked(artefacts: dict[str, Path]) -> None:
    spec = load_spec(artefacts["shift"])
    refuse_unfit(spec, Gpu(name="A GPU", compute_capability="8.7"))
    with pytest.raises(ConfigError, match=r"Old has compute capability 6\.1.* give --attention native"):
        refuse_unfit(spec, Gpu(name="Old", compute_capability="6.1"))
    wide = dataclasses.replace(spec, model=dataclasses.replace(spec.model, head_dim=192))
    with pytest.raises(ConfigError, match="heads are 192 wide"):
        refuse_unfit(wide, Gpu(name="A GPU", compute_capability="8.7"))
