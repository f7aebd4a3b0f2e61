"""Artefacts whose operator is still called `xl::RelativeAttention` run and become engines as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from runtimes.contract.spec import GRAPH
from runtimes.sessions.tensorrt.module import fresh_log
from xl_export.artefact.export import export
from xl_export.tensorrt.network import parse, read_model, take_plugins
from xl_export.tensorrt.operator import DOMAIN, JOIN, NAME, OLD_DOMAIN, PARTS


@pytest.fixture(scope="module")
def artefact(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact of today, with attention as one operator."""
    folder = tmp_path_factory.mktemp("today") / "artefact"
    return export(make_run(head_dim=16), folder, target="tensorrt", attention="plugin", memory="shift")


@pytest.fixture(scope="module")
def old(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same graph as it was written before: everything of the operator is in the domain
    `xl`.
    """
    folder = tmp_path_factory.mktemp("old")
    model = onnx.load(artefact / GRAPH)
    renamed = [
        item for item in (*model.graph.node, *model.functions, *model.opset_import) if item.domain == DOMAIN
    ]
    assert len(renamed) == 2 + len([node for node in model.graph.node if node.op_type == NAME])
    for item in renamed:
        item.domain = OLD_DOMAIN
    onnx.save(model, folder / GRAPH)
    return folder


def test_onnx_runtime_runs_the_old_name_by_its_function_body(artefact: Path, old: Path) -> None:
    answers = []
    for folder in (artefact, old):
        session = onnxruntime.InferenceSession(folder / GRAPH, providers=["CPUExecutionProvider"])
        draw = np.random.default_rng(0)
        feed = {}
        for value in session.get_inputs():
            sizes = [size if isinstance(size, int) else 1 for size in value.shape]
            kind = {"tensor(int64)": np.int64, "tensor(float16)": np.float16}[value.type]
            random = draw.normal(size=sizes) if kind is np.float16 else np.full(sizes, 3)
            feed[value.name] = random.astype(kind)
        answers.append(session.run(None, feed)[0])
    assert np.array_equal(*answers)
    assert np.ptp(answers[0]) > 0


def test_the_old_name_is_replaced_while_the_graph_is_read(artefact: Path, old: Path) -> None:
    model = read_model(old / GRAPH)
    assert OLD_DOMAIN not in {
        item.domain for item in (*model.graph.node, *model.functions, *model.opset_import)
    }
    assert [node.domain for node in model.graph.node] == [
        node.domain for node in read_model(artefact / GRAPH).graph.node
    ]
    attentions = sum(node.op_type == NAME for node in model.graph.node)
    assert take_plugins(model) == attentions > 0
    made = [(node.domain, node.op_type) for node in model.graph.node if node.op_type in (PARTS, JOIN)]
    assert made == [(DOMAIN, PARTS), (DOMAIN, JOIN)] * attentions


def test_tensorrt_parses_the_old_name_to_the_same_layers(artefact: Path, old: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux on x86-64)")
    now, before = (
        parse(trt, fresh_log(trt), folder, attention="native", name="TensorRT-RTX")
        for folder in (artefact, old)
    )
    assert (before.layers, before.types) == (now.layers, now.types)
