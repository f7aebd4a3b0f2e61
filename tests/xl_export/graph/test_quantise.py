"""Graphs of fewer bits: what is stored, and what is never written. test_precision_parity.py has their
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.precision import Precision
from runtimes.contract.reference import Reference, StepReference
from runtimes.contract.spec import GRAPH
from tests.nightly import matrix
from tests.streams import rows
from xl_export.artefact import validate
from xl_export.artefact.export import export
from xl_export.graph import quantise as presets

WRONG = [("a scale", "int4"), ("a column", "int8-stored"), ("a table", "int8")]


@pytest.mark.parametrize(("wrong", "precision"), WRONG)
def test_weights_with_a_wrong_scale_are_never_written(
    wrong: str, precision: Precision, calm_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The answers of a graph over the same weights are wrong alike, so the weights themselves are judged."""
    whole, of_bytes = presets.quantised, presets.in_bytes

    def blocks(matrix: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
        values, scales, zero_points = whole(matrix, bits)
        scales[0] *= 2
        return values, scales, zero_points

    def columns(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        values, scales = of_bytes(array, axis)
        if (array.ndim == 3) == (wrong == "a table"):
            scales[..., :1] *= 2 if wrong != "a column" else 1
            values = np.roll(values, int(wrong == "a column"), axis=-1)
        return values, scales

    with pytest.MonkeyPatch.context() as patch:
        if wrong == "a scale":
            patch.setattr(presets, "quantised", blocks)
        patch.setattr(presets, "MIN_VALUES", 64)  # so that the tables of a small run are stored in bytes
        patch.setattr(presets, "in_bytes", columns)
        with pytest.raises(ArtefactError, match="with values that are not its own, rounded; nothing was"):
            export(calm_run("transformer-xl"), tmp_path / "artefact", precision=precision)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "precision"),
    matrix(
        ("adaptive-softmax", "adaptive-softmax-wide-first"),
        ("fp16", "int8-stored", "int8", "int4"),
        together=1,
    ),
)
def test_large_vocabularies_score_and_predict_alike(
    kind: str, precision: Precision, calm_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    session = open_session(export(calm_run(kind), tmp_path / "artefact", precision=precision))
    batch = rows(tokens, 2, 8)
    logits, _ = session.step(batch, session.start(2))
    log_probs, _ = session.score(batch, batch, session.start(2))
    truth = np.take_along_axis(logits - log_sum_exp(logits)[..., None], batch[..., None], axis=-1)[..., 0]
    assert np.abs(log_probs - truth).max() < 1e-4


def test_a_tied_table_is_stored_once(calm_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = export(calm_run("transformer-xl"), tmp_path / "artefact", precision="int4")
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    readers = [node.op_type for node in graph.node if "vocabulary.table.0.values" in node.input]
    assert sorted(readers) == ["MatMulNBits", "Reshape"]
    assert not any(
        node.op_type in ("MatMul", "Gemm") and node.input[1].startswith("vocabulary") for node in graph.node
    )


@pytest.mark.parametrize(
    ("attributes", "bias"),
    [
        ({}, True),
        ({}, False),
        ({"transB": 1}, True),
        ({"transB": 1}, False),
        ({"alpha": 0.5, "beta": 2.0}, True),
    ],
    ids=str,
)
def test_products_with_a_bias_keep_their_meaning(
    attributes: dict[str, Any], bias: bool, tmp_path: Path
) -> None:
    """PyTorch writes a Gemm in each of these ways: Conv1D, and Linear of two axes with and without bias."""
    draw, K, N = np.random.default_rng(0), 64, 64
    x = ir.val("x", ir.DataType.FLOAT, ["rows", K])
    constants = [
        ir.val(name, const_value=ir.tensor(draw.normal(size=shape).astype(np.float32), name=name))
        for name, shape in (("w", (K, N)), ("c", (N,)))
    ]
    inputs = [x, *constants][: 3 if bias else 2]
    node = ir.node("Gemm", inputs, attributes)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=inputs[1:], opset_imports={"": 23})
    given, answers = draw.normal(size=(3, K)).astype(np.float32), []
    for bits in (0, 8):
        model = ir.Model(graph, ir_version=10)
        if bits:
            presets.quantise(model, bits)
        ir.save(model, tmp_path / "graph.onnx")
        answers.append(ort.InferenceSession(tmp_path / "graph.onnx").run(None, {"x": given})[0])
    assert any(node.op_type == "MatMulNBits" for node in model.graph) == ("alpha" not in attributes)
    assert np.abs(answers[0] - answers[1]).max() < 0.3 < np.abs(answers[0]).mean()


@pytest.mark.parametrize("bits", [8, None])
def test_several_look_ups_share_a_table(bits: int | None, tmp_path: Path) -> None:
    draw, V, D = np.random.default_rng(0), 50, 40
    numbers = draw.normal(size=(V, D)).astype(np.float32)
    name = "vocabulary.table"
    table = ir.val(name, const_value=ir.tensor(numbers, name=name))
    tokens = [ir.val(name, ir.DataType.INT64, ["rows"]) for name in ("first", "second")]
    nodes = [ir.node("Gather", [table, each]) for each in tokens]
    outputs = [node.outputs[0] for node in nodes]
    for number, output in enumerate(outputs):
        output.name, output.type = f"y{number}", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(tokens, outputs, nodes=nodes, initializers=[table], opset_imports={"": 23})
    model = ir.Model(graph, ir_version=10)
    presets.quantise(model, bits)
    ir.save(model, tmp_path / "graph.onnx")
    fed = {"first": np.array([3, 49]), "second": np.array([0, 7])}
    answers = ort.InferenceSession(tmp_path / "graph.onnx").run(None, fed)
    for answer, at in zip(answers, fed.values(), strict=True):
        assert np.abs(answer - numbers[at]).max() < 0.05


def test_quantised_answers_of_another_model_are_refused() -> None:
    draw = np.random.default_rng(0)
    log_probs = draw.normal(-3, 1, (2, 40)).astype(np.float32)
    reference = Reference(
        tokens=np.zeros((2, 41), np.int64),
        segments=np.array([8] * 5),
        restarts=np.zeros((5, 2), bool),
        log_probs=log_probs,
        last=log_probs[:, :3],
    )
    facts = {"precision": "int8", "memory_precision": "fp32", "tolerance": 1, "mean_tolerance": 1}
    session: Any = SimpleNamespace(spec=SimpleNamespace(**facts))
    with pytest.MonkeyPatch.context() as patch:
        for of_stored, of_lowered in ((0.1, -0.1), (0.1, None), (None, 0.1)):
            answers = [log_probs[:, ::-1] if x is None else log_probs + x for x in (of_stored, of_lowered)]
            patch.setattr(validate, "replay", lambda *_, left=answers: (left.pop(0), reference.last))
            if of_stored and of_lowered:
                found, _ = validate.check_lowered({GRAPH: session}, session, reference)
                assert (found.log_probs == log_probs + of_stored).all()
            else:
                with pytest.raises(ArtefactError, match="as another model's would"):
                    validate.check_lowered({GRAPH: session}, session, reference)


@pytest.mark.parametrize("wrong", [2.0, np.nan])
def test_outputs_of_another_step_are_refused(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = {name: np.ones((1, 8), np.float32) for name in ("first", "second")}
    reference = StepReference(
        inputs={}, segments=np.array([8]), restarts=np.zeros((1, 1), bool), outputs=right
    )
    facts = {"precision": "int8", "memory_precision": "fp32"}
    session: Any = SimpleNamespace(spec=SimpleNamespace(**facts))
    monkeypatch.setattr(validate, "replay_step", lambda *_: right | {"second": right["second"] * wrong})
    with pytest.raises(ArtefactError, match="as another step's would"):
        validate.check_lowered({GRAPH: session}, None, reference)
