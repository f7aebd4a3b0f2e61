"""What the step graph is made of: standard operators, one reader per memory tensor, tables of the right
size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.contract.tensors import FORMS
from xl_export.artefact.export import export


@pytest.fixture(params=FORMS)
def artefact(request: pytest.FixtureRequest, artefacts: dict[str, Path]) -> Path:
    return artefacts[request.param]


def test_the_graph_is_valid_and_holds_standard_operators_only(artefact: Path) -> None:
    onnx.checker.check_model(str(artefact / GRAPH), full_check=True)
    model = onnx.load(artefact / GRAPH, load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    assert len(model.functions) == 0
    assert model.ir_version <= 13  # ONNX Runtime 1.31 refuses newer ones


def test_batch_and_segment_are_dynamic_and_nothing_else(artefact: Path) -> None:
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    for value in (*graph.input, *graph.output):
        names = {dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param}
        assert names <= {"batch", "tokens"}, value.name
    assert [value.name for value in graph.input] == [tensor.name for tensor in load_spec(artefact).inputs]


def test_a_ring_tensor_has_one_reader(artefacts: dict[str, Path]) -> None:
    graph = onnx.load(artefacts["ring"] / GRAPH, load_external_data=False).graph
    for state in load_spec(artefacts["ring"]).state:
        readers = [node.op_type for node in graph.node for name in node.input if name == state.name]
        assert readers == ["TensorScatter"], state.name


def test_large_tensors_are_stored_once_in_the_external_file(artefact: Path) -> None:
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    outside = [i for i in graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL]
    assert {entry.value for i in outside for entry in i.external_data if entry.key == "location"} == {
        "weights.bin"
    }
    vocab, width = load_spec(artefact).model.vocab_size, load_spec(artefact).model.d_model
    assert [i.name for i in graph.initializer if sorted(i.dims) == sorted((vocab, width))] == [
        "vocabulary.table.0"
    ]
    assert (artefact / GRAPH).stat().st_size < 40_000


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (MemoryRule(mem_len=16, segment=8, mask="full"), 24),
        (MemoryRule(mem_len=16, segment=8, clamp_len=5), 6),
    ],
    ids=str,
)
def test_the_position_table_ends_at_the_longest_distance(
    rule: MemoryRule, expected: int, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    graph = onnx.load(export(make_run(rule=rule), tmp_path / "a") / GRAPH, load_external_data=False).graph
    tables = [list(i.dims) for i in graph.initializer if i.name.endswith("position_table")]
    assert tables == [[2, 6, expected]] * 2  # layers of [H, K, rows]
