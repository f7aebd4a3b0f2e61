"""Graphs for WebGPU: what they compute, and the operators that they may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes import open_session
from runtimes.contract.spec import FUSED, GRAPH, load_spec
from runtimes.contract.tensors import FORMS, Form
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import check
from tests.architectures import ARCHITECTURES
from tests.nightly import every, matrix
from tests.streams import answers_with_padding
from trainer.run.checkpoint import load_run
from trainer.run.session import TorchSession
from xl_export.artefact.export import export, make_spec, write_graphs

# Operators of ONNX Runtime's WebGPU provider, and those that only make shapes and rows of tables.
ON_THE_GPU = {
    "Add", "Cast", "Concat", "Div", "Equal", "Exp", "Expand", "Gather", "GatherElements", "Gemm", "Greater",
    "GreaterOrEqual", "LayerNormalization", "Less", "LessOrEqual", "MatMul", "Max", "Min", "Mul",
    "ReduceMax", "ReduceSum", "Relu", "Reshape", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Transpose",
    "Unsqueeze", "And", "Where", "Clip",
}  # fmt: skip
OF_SHAPES = {"Shape", "Range", "Mod", "Gather", "LogSoftmax", "ReduceLogSumExp"}


@pytest.mark.parametrize(("kind", "form"), matrix(tuple(ARCHITECTURES), FORMS, together=1))
def test_a_graph_for_the_web_computes_what_the_model_does(
    kind: str, form: Form, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run = load_run(make_run(**ARCHITECTURES[kind]))
    spec = make_spec(run, run.config.evaluation, form, "web", "fp32", "fp32")
    session = write_graphs(spec, tmp_path, run, "plugin")[GRAPH]
    torch = TorchSession(run.model.eval(), run.vocab, spec.rule, weights="torch")
    assert np.abs(answers_with_padding(session, tokens) - answers_with_padding(torch, tokens)).max() < 1e-4
    model = onnx.load(tmp_path / GRAPH)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 21)]
    assert {node.op_type for node in model.graph.node} <= ON_THE_GPU | OF_SHAPES
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor, str(tmp_path))
        assert array.dtype.kind == "i" or np.isfinite(array).all(), tensor.name


@pytest.mark.parametrize(
    ("precision", "memory"), every(3, [("int8", "fp16"), ("int8-stored", "fp32"), ("fp16", "fp32")])
)
def test_a_web_artefact_keeps_two_rings(
    precision: Any, memory: Any, calm_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """A ring of the other graphs is written in place; here past and present change places after each step."""
    artefact = export(
        calm_run("all-attention-groups"),
        tmp_path / "web",
        target="web",
        precision=precision,
        memory_precision=memory,
    )
    spec = load_spec(artefact)
    assert (spec.target, spec.form, spec.in_place) == ("web", "ring", False)
    assert spec.running_bytes_per_stream == 2 * spec.bytes_per_stream - 8
    assert FUSED not in spec.files
    assert "genai_config.json" not in spec.files
    report = check(artefact)
    assert report.passed, report.sentence
    session = open_session(artefact)
    assert isinstance(session, OrtSession)
    memory = session.start(1)
    session.step(tokens[None, :5], memory)
    at = {name: array.ctypes.data for name, array in memory.tensors.items()}
    before = {name: array.copy() for name, array in memory.tensors.items()}
    copy = memory.copy()
    lengths = [session.predict(tokens[None, 5:6], memory)[0], session.predict(tokens[None, 5:6], copy)[0]]
    assert np.array_equal(*lengths)
    for name, array in memory.tensors.items():
        changed = (array != before[name]).any(axis=(0, 1, 3))
        assert array.ctypes.data != at[name]
        assert np.flatnonzero(changed).tolist() == [5]  # the slot of the token's position, and no other
