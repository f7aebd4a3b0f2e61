"""Artefacts for TensorRT: float16 with the right parts in float32, attention as one node, and the same
answers as PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from runtimes import UserError, check
from runtimes.base.errors import ArtefactError
from runtimes.contract.precision import PRESETS
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.contract.tensors import head_groups
from tests.architectures import ARCHITECTURES
from tests.nightly import every
from xl_export.artefact.export import export
from xl_export.tensorrt.operator import DOMAIN, NAME, RING_ATTRIBUTES, RING_NAME

NATIVE = ("transformer-xl", "adaptive-softmax", "shaw", "all-attention")  # one for each kind of graph


@pytest.fixture(scope="module")
def artefact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(
        run, tmp_path_factory.mktemp("tensorrt") / "artefact", target="tensorrt", attention="plugin"
    )


def test_an_epsilon_that_engines_leave_out_is_named(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(**ARCHITECTURES["adaptive-span-gated-full"], layers=1)
    with pytest.raises(UserError, match=r"leave out span.epsilon, which is 0.01 here: give --exporter trace"):
        export(run, tmp_path / "a", target="tensorrt", precision="fp32")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow  # a trace takes seconds
def test_a_traced_graph_for_engines_keeps_the_epsilon(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(**ARCHITECTURES["adaptive-span-gated-full"], layers=1)
    traced = export(run, tmp_path / "b", target="tensorrt", precision="fp32", exporter="trace")
    assert check(traced).passed


# Plugins by default for a third of the architectures; test_build_rtx.py builds the function bodies of others.
@pytest.mark.parametrize(
    ("name", "attention"),
    every(3, [(name, "plugin") for name in ARCHITECTURES]) + every(2, [(name, "native") for name in NATIVE]),
)
def test_every_architecture_exports_for_tensorrt(
    name: str, attention: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    # type: ignore[arg-type]
    folder = export(make_run(**ARCHITECTURES[name]), tmp_path / "a", target="tensorrt", attention=attention)
    report, spec = check(folder), load_spec(folder)
    assert report.passed
    assert (report.tolerance, report.mean_tolerance) == (5e-2, 1e-2)
    cut = spec.rule.mask == "same-length" and spec.rule.mem_len > 0
    assert (spec.target, spec.precision, spec.form) == ("tensorrt", "fp16", "ring" if cut else "shift")
    assert {state.dtype for state in spec.state} <= {"float16"}
    nodes = [
        node
        for node in onnx.load(folder / GRAPH, load_external_data=False).graph.node
        if node.domain == DOMAIN
    ]
    expected = sum(map(len, head_groups(spec.model, spec.rule, spec.form))) if attention == "plugin" else 0
    assert len(nodes) == expected
    assert {node.op_type for node in nodes} <= {RING_NAME if cut else NAME}


def test_memory_of_half_the_size_and_the_logits_in_float32(
    artefact: Path, artefacts: dict[str, Path]
) -> None:
    half, whole = load_spec(artefact), load_spec(artefacts["shift"])
    slots = whole.rule.slots / whole.rule.mem_len
    assert 2 * (half.bytes_per_stream - 8) == slots * (whole.bytes_per_stream - 8)
    assert half.running_bytes_per_stream == half.bytes_per_stream  # in place
    assert [fact.dtype for fact in half.outputs] == ["float32"] + ["float16"] * len(half.state)
    assert dataclasses.replace(whole, target="tensorrt").state_dtype == "float32"


def test_the_graph_is_valid_and_small(artefact: Path) -> None:
    onnx.checker.check_model(str(artefact / GRAPH), full_check=True)
    model = onnx.load(artefact / GRAPH, load_external_data=False)
    assert [(function.domain, function.name) for function in model.functions] == [(DOMAIN, RING_NAME)]
    kinds = [node.op_type for node in model.graph.node]
    assert "GatherElements" not in kinds  # distances and masks went with the attention that needed them
    assert "Range" not in kinds
    attributes = {
        a.name: a.type for node in model.graph.node if node.op_type == RING_NAME for a in node.attribute
    }
    assert set(attributes) == {*RING_ATTRIBUTES, "heads", "slots"}
    assert onnx.AttributeProto.FLOAT not in attributes.values()


def test_a_weight_beyond_float16_is_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from trainer.run.checkpoint import load_run, save_tensors

    run = make_run()
    state = load_run(run).model.state_dict()
    state["blocks.1.out.weight"][0, 0] = 1e6
    save_tensors(run / "model.safetensors", state)
    with pytest.raises(UserError, match=r"blocks\.1\.out holds values beyond 65504"):
        export(run, tmp_path / "a", target="tensorrt")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_wrong_in_the_mean_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "fp16", dataclasses.replace(PRESETS["fp16"], mean_tolerance=1e-9))
    with pytest.raises(ArtefactError, match=r"in the mean, more than .* or 1e-09; nothing was written"):
        export(run, tmp_path / "a", target="tensorrt")
    assert list(tmp_path.iterdir()) == []


def test_one_weight_in_both_types_has_two_names() -> None:
    """The pass on a graph of its own: a constant that a product and a statistic share."""
    from xl_export.graph.half import to_half
    from xl_export.graph.ops import Ops

    op = Ops()
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape([2, 3]))
    w = op.constant(np.eye(3, dtype=np.float32), "w")
    y = op.LogSoftmax(op.MatMul(x, w), axis=-1)
    z = op.Add(y, op.ReduceLogSumExp(w))
    z.name = "z"
    graph = ir.Graph(
        [x], [z], nodes=op._tape.nodes, initializers=op._tape.initializers, opset_imports={"": 23}, name="g"
    )
    model = to_half(ir.Model(graph, ir_version=10), {"x": ir.DataType.FLOAT16, "z": ir.DataType.FLOAT})
    assert {value.name: value.dtype for value in model.graph.initializers.values()} == {
        "w": ir.DataType.FLOAT16,
        "w.float32": ir.DataType.FLOAT,
    }
    assert [node.op_type for node in model.graph] == [
        "MatMul",
        "Cast",
        "LogSoftmax",
        "ReduceLogSumExp",
        "Add",
    ]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
