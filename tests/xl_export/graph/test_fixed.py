"""Graphs of fixed sizes: what they compute, and that converters and engines of phones can have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.tools.mobile_helpers.usability_checker import check_coreml_partitions
from onnxruntime.transformers.float16 import convert_float_to_float16

from runtimes import Sampler, check, generate, open_session
from runtimes.contract.spec import GRAPH, load_spec
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from tests.nightly import every, matrix
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export

PLAIN = {
    *("Add", "Cast", "Clip", "Concat", "Div", "Exp", "Gather", "LayerNormalization", "MatMul", "Max", "Mod"),
    *("Mul", "ReduceSum", "Relu", "Reshape", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Transpose"),
    "Unsqueeze",
}
FIXABLE = [
    name for name, sizes in ARCHITECTURES.items() if not getattr(sizes.get("vocabulary"), "cutoffs", ())
]


@pytest.mark.parametrize(("name", "segment"), matrix(FIXABLE, (8, 1), together=1))
def test_every_architecture_is_computed_by_plain_operators(
    name: str, segment: int, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run = make_run(**ARCHITECTURES[name])
    rule = dataclasses.replace(load_run(run).config.evaluation, segment=segment)
    artefact = export(run, tmp_path / "a", rows=2, rule=rule)
    assert check(artefact).passed
    answers = []
    for session in (open_session(run).with_rule(rule), open_session(artefact)):
        memory = session.start(2)
        memory.positions[1] = -16  # the row begins with padding
        answers.append(feed(session, rows(tokens, 2, 80), [segment] * (80 // segment), memory)[0])
    difference = np.abs(answers[0] - answers[1])
    assert difference[0].max() < 1e-4
    assert difference[1, 17:].max() < 1e-4
    graph = onnx.load(artefact / GRAPH)
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 17)]
    assert {node.op_type for node in graph.graph.node} <= PLAIN
    for tensor in graph.graph.initializer:
        assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all(), tensor.name
    shapes = [value.type.tensor_type.shape for value in (*graph.graph.input, *graph.graph.output)]
    assert not any(size.dim_param for shape in shapes for size in shape.dim)


def test_a_late_position_is_right_in_float16(run: Path, tokens: np.ndarray, tmp_path: Path) -> None:
    """As accelerators compute, in which 65,520 and more are infinite."""
    artefact = export(run, tmp_path / "a", rows=1)
    spec = load_spec(artefact)
    reduced = convert_float_to_float16(onnx.load(artefact / GRAPH), keep_io_types=True)
    step = onnxruntime.InferenceSession(reduced.SerializeToString(), providers=["CPUExecutionProvider"])
    segment, exact = tokens[None, : spec.rule.segment], open_session(artefact)
    memory = exact.start(1)
    memory.positions[0] = 70_000
    expected, _ = exact.step(segment, memory)
    past = {state.name: np.zeros((1, *state.shape[1:]), np.float32) for state in spec.state}
    positions = 70_000 + np.arange(spec.rule.segment)[None]
    logits = step.run(["logits"], {"input_ids": segment, "position_ids": positions, **past})[0]
    assert np.abs(logits - expected).max() < 0.02


def test_coreml_has_the_graph_as_one_piece(run: Path, tmp_path: Path) -> None:
    """As `python -m onnxruntime.tools.check_onnx_model_mobile_usability` counts. Only the look-up of tokens
    is left to the CPU.
    """
    artefact = export(run, tmp_path / "a", rows=1, storage="single-file")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(artefact / GRAPH, options, providers=["CPUExecutionProvider"])
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "optimised.onnx"))
    found = check_coreml_partitions(graph, True, "coreml_supported_mlprogram_ops.md")
    assert found.num_partitions == 1
    assert found.unsupported_ops == {"ai.onnx:Gather"}


def test_a_text_is_fed_by_two_graphs_over_one_file_of_weights(
    make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run, artefact = make_run(layers=1), tmp_path / "artefact"
    result = xl("export", run, "--out", artefact, "--rows", "1", "--tokens", "1,4")
    assert "is ready: shift memory, memory 16, segment 4" in result.stdout
    stored = [
        {
            x.name: [(entry.key, entry.value) for entry in x.external_data]
            for x in onnx.load(artefact / name, load_external_data=False).graph.initializer
        }
        for name in (GRAPH, "step.1.onnx")
    ]
    shared = {
        name: place for name, place in stored[0].items() if place and not name.endswith("position_table")
    }
    assert shared
    assert {name: stored[1][name] for name in shared} == shared
    fed, text = tokens[None, :90], "The memory"
    sides = [open_session(each).with_rule(load_spec(artefact).rule) for each in (run, artefact)]
    one, other = (feed(session, fed, [4, 3, 1, 4, 4, 2] * 5)[0] for session in sides)
    assert np.abs(one - other).max() < 1e-4
    written = [
        "".join(piece.text for piece in generate(each, [text], max_tokens=20, sampler=Sampler(temperature=0)))
        for each in sides
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("precision", "storage", "memory"),
    every(2, [("int8", "ort", "fp32"), ("int4", "external", "fp16"), ("fp16", "external", "fp16")]),
)
def test_a_graph_of_fixed_sizes_in_fewer_bits(
    precision: Any, storage: Any, memory: Any, calm_run: Callable[..., Path], tmp_path: Path
) -> None:
    artefact = export(
        calm_run("all-attention-groups"),
        tmp_path / "a",
        rows=1,
        precision=precision,
        storage=storage,
        memory_precision=memory,
    )
    assert check(artefact).passed
