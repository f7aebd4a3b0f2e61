"""A graph of several tokens has the results of one token after the other, and repeats what has to wait."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime

from xl_export.graph.ops import Ops, remove_unused_nodes
from xl_export.graph.unrolled import Roles, unrolled

COUNT = 5
DRAW = np.random.default_rng(0)
WEIGHTS = DRAW.normal(size=(4, 4)).astype(np.float32)


def decaying() -> ir.Model:
    """h = (goes_on ? h : 0) sigmoid(x W) + x W and y = h W, over positions and x [batch, 1, 4]."""
    op = Ops()
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape(("batch", 1, 4)))
    at = ir.val("at", dtype=ir.DataType.INT64, shape=ir.Shape(("batch", 1)))
    past = ir.val("past", dtype=ir.DataType.FLOAT, shape=ir.Shape(("batch", 4)))

    def shaped(value: ir.Value, *sizes: str | int, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value.shape, value.dtype = ir.Shape(sizes), dtype
        return value

    matrix = op.constant(WEIGHTS)
    wide = shaped(
        op.MatMul(shaped(op.Squeeze(x, op.constant(np.array([1]))), "batch", 4), matrix), "batch", 4
    )
    begun = shaped(op.Greater(at, op.constant(np.int64(0))), "batch", 1, dtype=ir.DataType.BOOL)
    hidden = shaped(op.Where(begun, past, op.constant(np.float32(0))), "batch", 4)
    kept = shaped(op.Mul(hidden, shaped(op.Sigmoid(wide), "batch", 4)), "batch", 4)
    present = shaped(op.Add(kept, wide), "batch", 4)
    rows = shaped(op.Shape(past, start=0, end=1), 1, dtype=ir.DataType.INT64)
    sizes = shaped(op.Concat(rows, op.constant(np.array([1, 4])), axis=0), 3, dtype=ir.DataType.INT64)
    y = shaped(op.Reshape(shaped(op.MatMul(present, matrix), "batch", 4), sizes), "batch", 1, 4)
    y.name, present.name = "y", "present"
    graph = ir.Graph(
        [x, at, past],
        [y, present],
        nodes=op.nodes,
        initializers=op.initializers,
        opset_imports={"": 23},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, **fed: np.ndarray) -> list[np.ndarray]:
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = None
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return [np.asarray(x) for x in session.run(None, fed)]


def test_several_tokens_are_as_one_after_the_other() -> None:
    x = DRAW.normal(size=(3, COUNT, 4)).astype(np.float32)
    first = DRAW.normal(size=(3, 4)).astype(np.float32)
    at = np.arange(COUNT) + np.array([[1], [0], [-2]])  # rows that go on, begin, and begin later
    ys, past = [], first
    for n in range(COUNT):
        y, past = run(decaying(), x=x[:, n : n + 1], at=at[:, n : n + 1], past=past)
        ys.append(y)
    model = unrolled(decaying(), COUNT, Roles(["x", "at"], ["y"], memory=1))
    remove_unused_nodes(model)
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["Where"], kinds["MatMul"], kinds["Sigmoid"]) == (1, 2, 1)
    assert kinds["Mul"] == kinds["Add"] == COUNT
    # onnx_ir warns of a shape without a type.
    assert all(value.type for node in model.graph for value in node.outputs if value.shape is not None)
    found, last = run(model, x=x, at=at, past=first)
    np.testing.assert_allclose(found, np.concatenate(ys, axis=1), atol=1e-6)
    np.testing.assert_allclose(last, past, atol=1e-6)
