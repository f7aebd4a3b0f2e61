"""One pass over a step graph: float32 → float16, but for the parts whose sums or differences need more.

The result is strongly typed, as TensorRT wants it: no operator has inputs of both types, and where they meet there is a Cast.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from runtimes.base.errors import ArtefactError

HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
PRODUCTS = {
    "MatMul",
    "Gemm",
    "Attention",
    "RelativeAttention",
}  # what GPUs do in float16, with sums in float32
STATISTICS = {"LayerNormalization", "Softmax"}  # float32 inside; what comes out is a product's input again
LOG_PROBABILITIES = {"LogSoftmax", "ReduceLogSumExp"}  # float32, and so is what is computed from them


def to_half(model: ir.Model, promised: Mapping[str, ir.DataType]) -> ir.Model:
    """The same graph in float16; its inputs and outputs have the promised types, by name.

    Products take and give float16. Statistics are computed in float32. Log-probabilities, and what is computed from them, stay
    float32. Everything else has the type of what it is given, constants following.
    Raises ArtefactError where a weight is beyond the range of float16.
    """
    return _Rewriting(ShapeInferencePass()(model).model, promised).result()


class _Rewriting:
    """`same`: the new graph's values for those of the old one, by old value and new type."""

    def __init__(self, model: ir.Model, promised: Mapping[str, ir.DataType]) -> None:
        self.model, self.promised, self.tape = model, promised, ir.tape.Tape()
        self.same: dict[tuple[ir.Value, ir.DataType | None], ir.Value] = {}
        self.kind: dict[
            ir.Value, ir.DataType | None
        ] = {}  # of old values, in the new graph; constants have none yet

    def result(self) -> ir.Model:
        graph = self.model.graph
        inputs = []
        for value in graph.inputs:
            new = ir.val(value.name, dtype=self.promised[value.name or ""], shape=value.shape)
            self.know(value, new)
            inputs.append(new)
        for node in graph:
            self.rewrite(node)
        outputs = []
        for value in graph.outputs:
            new = self.of(value, self.promised[value.name or ""])
            new.name, new.shape = value.name, value.shape
            outputs.append(new)
        new_graph = ir.Graph(
            inputs, outputs, nodes=self.tape.nodes, initializers=self.tape.initializers, opset_imports=graph.opset_imports,
            name=graph.name,
        )  # fmt: skip
        return ir.Model(new_graph, ir_version=self.model.ir_version, producer_name=self.model.producer_name)

    def rewrite(self, node: ir.Node) -> None:
        """Records a node with inputs of one type."""
        given = {self.kind.get(value) for value in node.inputs if value is not None and _is_float(value)}
        if node.op_type in STATISTICS | LOG_PROBABILITIES:
            kind = SINGLE
        elif node.op_type in PRODUCTS:
            kind = HALF
        else:
            kind = SINGLE if SINGLE in given else HALF
        inputs = [self.of(value, kind) if value is not None else None for value in node.inputs]
        results = self.tape.op_multi_out(
            node.op_type,
            inputs,
            num_outputs=len(node.outputs),
            attributes=node.attributes,
            domain=node.domain,
        )
        for old, new in zip(node.outputs, results, strict=True):
            assert old.dtype is not None, f"the type of {node.op_type}'s output is not known"
            new.dtype, new.shape = (kind if _is_float(old) else old.dtype), old.shape
            self.know(old, self.converted(new, HALF) if node.op_type in STATISTICS else new)

    def know(self, old: ir.Value, new: ir.Value) -> None:
        self.same[old, new.dtype], self.kind[old] = new, new.dtype

    def of(self, value: ir.Value, kind: ir.DataType) -> ir.Value:
        """The new graph's value for an old one, in the given type if it is of floats: as it is, cast, or a constant."""
        wanted = kind if _is_float(value) else value.dtype
        if (value, wanted) not in self.same:
            if value.const_value is not None:
                self.same[value, wanted] = self.constant(value, wanted)
            else:
                self.same[value, wanted] = self.converted(self.same[value, self.kind[value]], kind)
        return self.same[value, wanted]

    def converted(self, value: ir.Value, kind: ir.DataType) -> ir.Value:
        new = self.tape.op("Cast", [value], {"to": kind.value})
        new.dtype, new.shape = kind, value.shape
        return new

    def constant(self, value: ir.Value, kind: ir.DataType | None) -> ir.Value:
        """An initializer; one that is needed in both types has two, under two names."""
        assert value.const_value is not None, value
        array, name = value.const_value.numpy(), value.name
        if kind == HALF:
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
            if np.isinf(array).sum() != np.isinf(value.const_value.numpy()).sum():
                raise ArtefactError(
                    f"{name} holds values beyond 65504, the range of float16; export it without --target tensorrt."
                )
        twice = any((value, other) in self.same for other in (HALF, SINGLE))
        return self.tape.initializer(ir.tensor(array, name=f"{name}.{array.dtype}" if twice else name))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == SINGLE
