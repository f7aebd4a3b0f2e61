"""Who takes an attention node, a plugin or the function body, as TensorRT-RTX's parser has it.

That a registered plugin is taken cannot be shown here: TensorRT-RTX's Python package has none that its parser
could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes.base.errors import ArtefactError
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.sessions.tensorrt.module import fresh_log
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export
from xl_export.tensorrt.network import parse, take_plugins
from xl_export.tensorrt.operator import DOMAIN, JOIN, SIGNATURES, VERSION, Signature

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")


class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
    """Of a plugin with this name; counts how often one is asked for, and keeps with what."""

    def __init__(self, name: str, attributes: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.plugin_namespace, self.plugin_version, self.asked = name, DOMAIN, str(VERSION), 0
        self.fields: set[str] = set()
        self.field_names = trt.PluginFieldCollection(
            [trt.PluginField(attribute, np.array([]), trt.PluginFieldType.INT64) for attribute in attributes]
        )

    def create_plugin(self, name: str, fields: Any, phase: Any) -> None:
        self.asked += 1
        self.fields = {field.name for field in fields}


@pytest.fixture
def creators() -> Iterator[list[Creator]]:
    made = [*(Creator(form.parts, form.attributes) for form in SIGNATURES), Creator(JOIN, ())]
    registry = trt.get_plugin_registry()
    assert all(registry.register_creator(creator, DOMAIN) for creator in made)
    yield made
    for creator in made:
        registry.deregister_creator(creator)


@pytest.fixture(
    scope="module",
    params=[("transformer-xl", "shift"), ("transformer-xl", "ring"), ("all-attention-groups", "shift")],
    ids="-".join,
)
def artefact(
    request: pytest.FixtureRequest, make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    name, form = request.param
    run = make_run(**{"head_dim": 16, **ARCHITECTURES[name]})
    return export(
        run,
        tmp_path_factory.mktemp("choice") / "artefact",
        target="tensorrt",
        attention="plugin",
        memory=form,
    )


@pytest.fixture
def signature(artefact: Path) -> Signature:
    """That of the operator which the artefact has."""
    return SIGNATURES[load_spec(artefact).form == "ring"]


def test_the_body_is_used_unless_plugins_are_chosen(artefact: Path, creators: list[Creator]) -> None:
    parsed = parse(trt, fresh_log(trt), artefact, attention="native", name="TensorRT-RTX")
    assert parsed.plugin_layers == 0
    assert "PLUGIN_V3" not in parsed.layers
    assert [creator.asked for creator in creators] == [0, 0, 0]


def test_a_chosen_plugin_gets_every_attribute(
    artefact: Path, creators: list[Creator], signature: Signature
) -> None:
    with pytest.raises(ArtefactError, match=rf"node .* {signature.parts} "):  # since ours makes none
        parse(trt, fresh_log(trt), artefact, attention="plugin", name="TensorRT-RTX")
    (asked,) = (creator for creator in creators if creator.asked)
    assert asked.name == signature.parts
    assert asked.fields == set(signature.attributes)


def test_every_attention_becomes_two_nodes_of_the_same_names_around(
    artefact: Path, signature: Signature
) -> None:
    model = onnx.load(artefact / GRAPH, load_external_data=False)
    before = list(onnx.load(artefact / GRAPH, load_external_data=False).graph.node)
    count = take_plugins(model)
    assert count == sum((node.domain, node.op_type) == (DOMAIN, signature.name) for node in before) > 0
    after = list(model.graph.node)
    assert len(after) == len(before) + count
    kept = [node for node in after if node.op_type not in (signature.parts, JOIN)]
    assert kept == [node for node in before if node.op_type != signature.name]
    made = {name for node in after for name in node.output}
    assert {name for node in before for name in node.output} <= made
