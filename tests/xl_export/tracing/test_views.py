"""Operators that only change shapes leave a traced step, and its numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from xl_export.graph.ops import Ops, remove_unused_nodes
from xl_export.tracing.views import drop_softplus_thresholds, join_views

Build = Callable[[Ops, ir.Value], ir.Value]


def model_of(build: Build, sizes: tuple[str | int, ...]) -> ir.Model:
    """A graph of some views between an Add and a Mul; shapes as PyTorch's exporter infers them."""
    op = Ops()
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape(sizes))
    first = op.Add(x, op.constant(np.float32(1)))
    first.shape = x.shape
    last = op.Mul(build(op, first), op.constant(np.float32(2)))
    last.name, last.dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph(
        [x], [last], nodes=op.nodes, initializers=op.initializers, opset_imports={"": 23}, name="g"
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(session.run(None, {"x": x})[0])


def shaped(value: ir.Value, *sizes: str | int) -> ir.Value:
    value.shape = ir.Shape(sizes)
    return value


def there_and_back(op: Ops, x: ir.Value) -> ir.Value:
    turned = shaped(op.Transpose(x, perm=[0, 2, 1]), "batch", 6, 1)
    picked = shaped(op.Gather(turned, op.constant(np.int64(0)), axis=2), "batch", 6)
    return shaped(op.Unsqueeze(picked, op.constant(np.array([1]))), "batch", 1, 6)


def to_a_column(op: Ops, x: ir.Value) -> ir.Value:
    picked = shaped(op.Gather(x, op.constant(np.int64(-1)), axis=1), "batch", 6)
    return shaped(op.Unsqueeze(picked, op.constant(np.array([2]))), "batch", 6, 1)


def same_twice(op: Ops, x: ir.Value) -> ir.Value:
    columns = [shaped(op.Transpose(x, perm=[0, 2, 1]), "batch", 6, 1) for _ in range(2)]
    return shaped(op.Sub(columns[0], op.Mul(columns[1], columns[1])), "batch", 6, 1)


@pytest.mark.parametrize(
    ("build", "left"), [(there_and_back, []), (to_a_column, ["Reshape"]), (same_twice, ["Reshape"])]
)
def test_a_chain_of_views_is_at_most_one_reshape(build: Build, left: list[str]) -> None:
    model = model_of(build, ("batch", 1, 6))
    x = np.random.default_rng(0).normal(size=(3, 1, 6)).astype(np.float32)
    before = run(model, x)
    join_views(model.graph)
    remove_unused_nodes(model)
    arithmetic = ("Add", "Mul", "Sub")
    assert [node.op_type for node in model.graph if node.op_type not in arithmetic] == left
    np.testing.assert_array_equal(run(model, x), before)


def moves_elements(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(op.Transpose(x, perm=[0, 2, 1]), "batch", 6, 2)


def picks_one_of_two(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(op.Gather(x, op.constant(np.int64(0)), axis=1), "batch", 6)


@pytest.mark.parametrize("build", [moves_elements, picks_one_of_two])
def test_an_operator_that_moves_or_drops_elements_stays(build: Build) -> None:
    model = model_of(build, ("batch", 2, 6))
    x = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    before = run(model, x)
    join_views(model.graph)
    assert [node.op_type for node in model.graph][1] in ("Transpose", "Gather")
    np.testing.assert_array_equal(run(model, x), before)


@pytest.mark.parametrize(("limit", "nodes"), [(20.0, 3), (1.0, 5)])
def test_softplus_needs_no_branch_where_it_rounds_to_its_input(limit: float, nodes: int) -> None:
    def softplus(op: Ops, x: ir.Value) -> ir.Value:
        return op.Where(op.Greater(x, op.constant(np.float32(limit))), x, op.Softplus(x))

    model = model_of(softplus, ("batch", 6))
    x = np.array([[-30, -1, 0.5, 19, 20.5, 90]], np.float32)
    before = run(model, x)
    drop_softplus_thresholds(model.graph)
    remove_unused_nodes(model)
    assert len(model.graph) == nodes
    np.testing.assert_array_equal(run(model, x), before)
