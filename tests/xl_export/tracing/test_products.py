"""Products of a traced step get operators that are faster for one token, and its numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from tests.xl_export.tracing.test_views import model_of, run, shaped
from xl_export.graph.ops import Ops, remove_unused_nodes
from xl_export.tracing.graph import _transpose_constants
from xl_export.tracing.products import multiply_convolutions, order_products, put_constants_last

C, WIDTH = 6, 4
Build = Callable[[Ops, ir.Value], ir.Value]
Pass = Callable[[ir.Graph], None]
draw = np.random.default_rng(0)


def random(*sizes: int) -> np.ndarray:
    return draw.normal(size=sizes).astype(np.float32)


WEIGHT, BIAS = random(C, 1, WIDTH), random(C)


def left(build: Build, sizes: tuple[str | int, ...], change: Pass) -> list[str]:
    """The operators of a graph after a pass, which does not change what it computes."""
    model = model_of(build, sizes)
    x = random(*(3 if isinstance(size, str) else size for size in sizes))
    before = run(model, x)
    change(model.graph)
    remove_unused_nodes(model)
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=1e-6)
    return [node.op_type for node in model.graph]


def sliced(op: Ops, x: ir.Value, *bounds: int) -> ir.Value:
    return op.Slice(x, *(op.constant(np.array([bound])) for bound in bounds), op.constant(np.array([2])))


def convolution(op: Ops, x: ir.Value, outputs: int, *more: ir.Value, **attributes: object) -> ir.Value:
    options = {"group": C, "kernel_shape": [WIDTH], **attributes}
    return shaped(op.Conv(x, op.constant(WEIGHT), *more, **options), "batch", C, outputs)


def one_output(op: Ops, x: ir.Value) -> ir.Value:
    return convolution(op, x, 1, op.constant(BIAS))


def last_of_two(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(sliced(op, convolution(op, x, 2), -1, 1 << 62), "batch", C, 1)


def with_memory(op: Ops, x: ir.Value) -> ir.Value:
    """The memory after the step is what the last output is computed from."""
    both = convolution(op, x, 2)
    memory = shaped(sliced(op, x, 1, 5), "batch", C, WIDTH)
    return shaped(op.Add(shaped(sliced(op, both, 1, 2), "batch", C, 1), memory), "batch", C, WIDTH)


@pytest.mark.parametrize(
    ("build", "length", "operators"),
    [
        (one_output, 4, ["Reshape", "Mul", "ReduceSum", "Reshape", "Add"]),
        (last_of_two, 5, ["Slice", "Reshape", "Mul", "ReduceSum"]),
        (with_memory, 5, ["Slice", "Reshape", "Mul", "ReduceSum", "Add"]),
    ],
)
def test_one_output_of_a_depthwise_convolution_is_a_sum(
    build: Build, length: int, operators: list[str]
) -> None:
    found = left(build, ("batch", C, length), multiply_convolutions)
    assert sorted(found) == sorted(["Add", *operators, "Mul"])  # with those of `model_of`


def first_of_two(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(sliced(op, convolution(op, x, 2), 0, 1), "batch", C, 1)


def both(op: Ops, x: ir.Value) -> ir.Value:
    return convolution(op, x, 2)


def padded(op: Ops, x: ir.Value) -> ir.Value:
    y = convolution(op, x, 4, pads=[1, 1])
    return shaped(sliced(op, y, -1, 1 << 62), "batch", C, 1)


def every_second(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(sliced(op, convolution(op, x, 1, strides=[2]), -1, 1 << 62), "batch", C, 1)


def across_channels(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(op.Conv(x, op.constant(random(C, C, 5))), "batch", C, 1)


@pytest.mark.parametrize("build", [first_of_two, both, padded, every_second, across_channels])
def test_other_convolutions_stay(build: Build) -> None:
    assert "Conv" in left(build, ("batch", C, 5), multiply_convolutions)


def by_a_column(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(op.MatMul(op.constant(random(9, C)), x), "batch", 9, 1)


def by_two_columns(op: Ops, x: ir.Value) -> ir.Value:
    matrix = op.constant(random(9, C))
    columns = x, op.Mul(x, x)
    columns[1].shape = x.shape
    return op.Add(*(shaped(op.MatMul(matrix, column), "batch", 9, 1) for column in columns))


def by_columns(op: Ops, x: ir.Value) -> ir.Value:
    return shaped(op.MatMul(op.constant(random(9, C)), x), "batch", 9, 2)


def test_a_constant_is_the_second_factor() -> None:
    def change(graph: ir.Graph) -> None:
        put_constants_last(graph)
        _transpose_constants(graph)

    found = left(by_a_column, ("batch", C, 1), change)
    assert found == ["Add", "Transpose", "MatMul", "Transpose", "Mul"]
    assert left(by_two_columns, ("batch", C, 1), put_constants_last).count("Transpose") == 1 + 2 + 2
    assert left(by_columns, ("batch", C, 2), put_constants_last) == ["Add", "MatMul", "Mul"]


def scaled_row(op: Ops, x: ir.Value) -> ir.Value:
    """The first product has C · 3 elements of a row; that of the other two factors has C."""
    wide = shaped(op.Mul(x, op.constant(random(1, 1, 3))), "batch", C, 3)
    return shaped(op.Mul(wide, x), "batch", C, 3)


def read_twice(op: Ops, x: ir.Value) -> ir.Value:
    wide = shaped(op.Mul(x, op.constant(random(1, C, 3))), "batch", C, 3)
    return shaped(op.Add(op.Mul(wide, x), wide), "batch", C, 3)


def outer(op: Ops, x: ir.Value) -> ir.Value:
    row = shaped(op.Transpose(x, perm=[0, 2, 1]), "batch", 1, C)
    product = shaped(op.Mul(row, x), "batch", C, C)
    product.dtype = ir.DataType.FLOAT
    return product


def test_the_smallest_product_comes_first() -> None:
    model = model_of(scaled_row, ("batch", C, 1))
    order_products(model.graph)
    remove_unused_nodes(model)
    # The number by which `model_of` multiplies goes to the front too.
    assert [node.outputs[0].shape for node in model.graph][:3] == [ir.Shape(["batch", C, 1])] * 3
    assert left(scaled_row, ("batch", C, 1), order_products) == ["Add", "Mul", "Mul", "Mul"]
    assert left(read_twice, ("batch", C, 1), order_products) == ["Add", "Mul", "Mul", "Add", "Mul"]


def test_a_column_by_a_row_is_a_product_of_matrices() -> None:
    assert left(outer, ("batch", C, 1), order_products) == ["Add", "Transpose", "Mul", "MatMul"]
