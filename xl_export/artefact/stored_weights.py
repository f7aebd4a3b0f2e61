"""The fp32 graph over the weights that a lowered graph stores: what such an artefact should compute.

Engines that multiply in few bits round activations too, each in its own way. This graph only rounds the
weights, so its answers are the same on every machine but for the order of additions. They are the reference
that all engines of an artefact are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.base.errors import ArtefactError
from xl_export.graph.ops import constant, remove_unused_nodes
from xl_export.graph.qdq import CLIP_SHARES, FORMATS
from xl_export.graph.quantise import (
    BLOCK,
    COLUMN_SCALES,
    SCALES,
    Matrix,
    embedding_of,
    matrix_of,
)

FLOAT16_ERROR = 2.0**-10  # what float16 may change a value or its scale by, as a share of it
ABSOLUTE_ERROR = 2.0**-16  # added for a scale so small that float16 has few bits for it


def put_at_stored_values(exact: ir.Model, lowered: ir.Model) -> None:
    """Gives the constants of an fp32 graph the values that a lowered graph of the same model stores for them.

    exact: the graph that is changed. Constants that the lowered graph stores in float32 or does not have stay
    as they are. Raises ArtefactError if a stored value is not the exact one, rounded to the nearest that
    its scale allows: a wrong scale or axis would otherwise be part of every answer that is compared.
    """
    graph = exact.graph
    stored = _Stored(lowered)
    for node in list(graph):
        matrix = matrix_of(node)
        at = 1
        if matrix is None:
            matrix = embedding_of(node)
            at = 0
        if matrix is None or (found := stored.matrix(matrix)) is None:
            continue
        array = found.refuse_unlike(matrix.array, matrix.name)
        # A MatMul needs [K, N], whatever its source; a Gemm and a look-up have their own layouts.
        turned = matrix.turned and node.op_type != "MatMul"
        name = f"{matrix.name}.{'rows' if turned else 'matrix'}.rounded"
        if name not in graph.initializers:
            constant(graph, name, array.T if turned else array)
        node.replace_input_with(at, graph.initializers[name])
    for name, value in graph.initializers.items():
        if (found := stored.table(name)) is not None:
            assert value.const_value is not None, name
            array = found.refuse_unlike(value.const_value.numpy(), name)
            value.const_value = ir.tensor(array, name=name)
    remove_unused_nodes(exact)


@dataclass(frozen=True)
class _Rounded:
    """The values of a stored array."""

    array: np.ndarray
    steps: np.ndarray  # the distance between the values that each number may have
    # Where a number has the largest value of its format: TensorRT's formats clip larger ones to it.
    ends: np.ndarray | None = None

    def refuse_unlike(self, exact: np.ndarray, name: str) -> np.ndarray:
        """The array; raises ArtefactError if one of its values is not its exact value, rounded."""
        most = float(np.finfo(np.float16).max)
        if np.isinf(exact).any():  # masks, which are stored in float16
            exact = np.where(np.isinf(self.array) & (self.array == exact), self.array, exact)
        same = self.array == np.clip(exact, -most, most)
        size = np.abs(np.where(same, 0, self.array))
        with np.errstate(invalid="ignore"):
            near = (
                np.abs(np.where(same, 0, self.array - exact))
                <= 0.51 * self.steps + size * FLOAT16_ERROR + ABSOLUTE_ERROR
            )
        if self.ends is not None:
            cut = self.array * exact >= 0
            cut &= (size <= np.abs(exact) * (1 + FLOAT16_ERROR)) & (
                np.abs(exact) * min(CLIP_SHARES) <= size * (1 + FLOAT16_ERROR)
            )
            near |= self.ends & cut
        if not (near | same).all():
            raise ArtefactError(
                f"{name} is stored in fewer bits with values that are not its own, rounded; nothing was "
                "written: export in fp32, or report this difference."
            )
        return self.array


class _Stored:
    """The constants of a lowered graph, and their values in float32."""

    def __init__(self, model: ir.Model) -> None:
        self.constants = model.graph.initializers

    def matrix(self, matrix: Matrix) -> _Rounded | None:
        """W [K, N] of a product; None if the graph does not store it in fewer bits."""
        rows = len(matrix.array)
        if (values := self.array(f"{matrix.name}.int8")) is not None:
            scales = self.array(f"{matrix.name}{COLUMN_SCALES}")
            assert scales is not None, matrix.name
            return _Rounded((values.T if matrix.turned else values).astype(np.float32) * scales, scales)
        parts = [self.array(f"{matrix.name}.{kind}") for kind in ("values", "scales", "zero_points")]
        if all(part is not None for part in parts):
            return _of_blocks(*parts, rows=rows)
        values, scales = (self.array(f"{matrix.source}.{kind}") for kind in ("values", "scales"))
        if values is None or scales is None:
            return None
        block = rows // len(scales) if scales.ndim == 2 else rows  # as TensorRT has them, by DequantizeLinear
        factors = np.repeat(np.atleast_2d(scales).astype(np.float32), block, axis=0)
        wide = values.astype(np.float32)
        chosen = next(format_ for format_ in FORMATS.values() if format_.dtype.numpy() == values.dtype)
        return _Rounded(wide * factors, factors, np.abs(wide) == chosen.largest)

    def table(self, name: str) -> _Rounded | None:
        """A constant that is not a matrix of a product; None if it is stored in float32."""
        values = self.array(f"{name}.int8")
        scales = self.array(name + SCALES)
        if values is not None and scales is not None:
            return _Rounded(values.astype(np.float32) * scales, scales)
        if f"{name}.fp16" not in self.constants or (array := self.array(name)) is None:
            return None
        return _Rounded(array, np.zeros_like(array))

    def array(self, name: str) -> np.ndarray | None:
        """A constant by the name it had before small numbers became halves, which are widened."""
        value = self.constants.get(name)
        if value is None and (halves := self.constants.get(f"{name}.fp16")) is not None:
            assert halves.const_value is not None, name
            return halves.const_value.numpy().astype(np.float32)
        return None if value is None or value.const_value is None else value.const_value.numpy()


def _of_blocks(values: np.ndarray, scales: np.ndarray, zero_points: np.ndarray, *, rows: int) -> _Rounded:
    """W [K, N] of the blocks that `quantise.quantised` makes."""
    columns = len(values)
    blocks = values.shape[1]
    if values.shape[2] < BLOCK:  # two numbers in a byte, the first in the low bits
        values = np.stack([values & 15, values >> 4], axis=-1)
        zero_points = np.stack([zero_points & 15, zero_points >> 4], axis=-1)
    numbers = values.reshape(columns, blocks, BLOCK).astype(np.float32)
    zeros = zero_points.reshape(columns, -1)[:, :blocks, None].astype(np.float32)
    steps = np.broadcast_to(scales.reshape(columns, blocks, 1).astype(np.float32), numbers.shape)
    wide = (numbers - zeros) * steps
    return _Rounded(*(np.ascontiguousarray(x.reshape(columns, -1)[:, :rows].T) for x in (wide, steps)))
