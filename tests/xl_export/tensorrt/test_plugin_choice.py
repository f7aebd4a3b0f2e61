"""Who takes an attention node, a plugin or the function body, as TensorRT-RTX's parser has it.

That a registered plugin is taken cannot be shown here: TensorRT-RTX's Python package has none that its parser could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes.errors import ArtefactError
from runtimes.spec import GRAPH
from runtimes.trt_module import fresh_log
from tests.architectures import ARCHITECTURES
from xl_export.artefact import export
from xl_export.tensorrt.network import choose_attention, parse
from xl_export.tensorrt.operator import DOMAIN, NAME, PLUGIN, VERSION
from xl_export.tensorrt.plugin import ATTRIBUTES

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")


class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
    """Of a plugin with the operator's name; counts how often one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.plugin_namespace, self.plugin_version, self.asked = NAME, DOMAIN, str(VERSION), 0
        self.field_names = trt.PluginFieldCollection(
            [trt.PluginField(name, np.array([]), trt.PluginFieldType.INT64) for name in ATTRIBUTES]
        )

    def create_plugin(self, name: str, fields: Any, phase: Any) -> None:
        self.asked += 1


@pytest.fixture
def creator() -> Iterator[Creator]:
    made, registry = Creator(), trt.get_plugin_registry()
    assert registry.register_creator(made, DOMAIN)
    yield made
    registry.deregister_creator(made)


@pytest.fixture(scope="module", params=["transformer-xl", "all-attention-groups"])
def artefact(request: pytest.FixtureRequest, make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(**{"head_dim": 16, **ARCHITECTURES[request.param]})
    return export(run, tmp_path_factory.mktemp("choice") / "artefact", target="tensorrt", attention="plugin")


def test_the_body_is_taken_unless_the_plugin_is_chosen_though_it_is_registered(artefact: Path, creator: Creator) -> None:
    parsed = parse(trt, fresh_log(trt), artefact, attention="native", name="TensorRT-RTX")
    assert parsed.plugin_layers == 0
    assert "PLUGIN_V3" not in parsed.layers
    assert creator.asked == 0


def test_a_plugin_that_is_not_there_is_not_replaced_by_the_body_silently(artefact: Path) -> None:
    with pytest.raises(ArtefactError, match=r"took the plugin for 0 of \d attentions; give --attention native"):
        parse(trt, fresh_log(trt), artefact, attention="plugin", name="TensorRT-RTX")


def test_the_nodes_say_which_of_the_two_is_meant(artefact: Path) -> None:
    model = onnx.load(artefact / GRAPH, load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    for attention, extra in (("native", set()), ("plugin", set(PLUGIN)), ("native", set())):
        assert choose_attention(model, attention) == len(nodes) > 0  # type: ignore[arg-type]
        for node in nodes:
            assert {attribute.name for attribute in node.attribute} == {*ATTRIBUTES, *extra}
