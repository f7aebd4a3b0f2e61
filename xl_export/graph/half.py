"""A pass over a step graph: float32 → float16, except the parts whose sums or differences need more
precision.

The result is strongly typed, as TensorRT requires: no operator has inputs of both types. A Cast connects the
types.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from runtimes.base.errors import ArtefactError

HALF = ir.DataType.FLOAT16
SINGLE = ir.DataType.FLOAT
# GPUs compute products in float16, and their sums in float32.
PRODUCTS = {"MatMul", "Gemm", "Einsum", "RelativeAttention", "RelativeAttentionInRing"}
NORM = "LayerNormalization"
# Computed in float32; their results are inputs of products again. TensorRT 11.3 computes Attention between
# casts in a kernel that multiplies in float16 and sums in float32 (see `expose_casts` in `network.py`).
IN_SINGLE = {"Attention", NORM, "Softmax"}
# Log-probabilities are float32, and so is everything that is computed from them.
LOG_PROBABILITIES = {"LogSoftmax", "ReduceLogSumExp"}


def to_half(model: ir.Model, promised: Mapping[str, ir.DataType], *, norms: ir.DataType = SINGLE) -> ir.Model:
    """The same graph in float16; its inputs and outputs have the types that `promised` names for them.

    Products have float16 inputs and outputs. Statistics and Attention are computed in float32, between casts.
    Log-probabilities, and what is computed from them, stay float32. Every other operator has the type of its
    inputs, and constants follow. norms: the type of the inputs and outputs of norms, for a runtime whose
    norms of halves have sums in float32. Raises ArtefactError if a weight is beyond the range of float16.
    """
    return _Rewriting(ShapeInferencePass()(model).model, promised, norms).result()


def rounded(model: ir.Model) -> ir.Model:
    """The graph itself, which `to_half` made, in float32 now, with every result rounded to float16.

    ONNX Runtime's CPU provider would compute a graph of halves in float32, and remove the casts that it
    inserts between its nodes. So it would round nothing.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.dtype == HALF:
            value.dtype = SINGLE
            if value.const_value is not None:
                array = value.const_value.numpy().astype(np.float32)
                value.const_value = ir.tensor(array, name=value.name)
    for node in list(graph):
        if node.op_type == "Cast" and node.outputs[0].dtype == HALF:
            node.attributes["to"] = ir.AttrInt64("to", SINGLE.value)
        for value in node.outputs:
            if value.dtype == HALF:
                value.dtype = SINGLE
                narrow = ir.node("Cast", [value], {"to": HALF.value})
                wide = ir.node("Cast", narrow.outputs, {"to": SINGLE.value})
                (result,) = wide.outputs
                result.dtype, result.shape = SINGLE, value.shape
                ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
                narrow.replace_input_with(0, value)
                result.name, value.name = value.name, f"{value.name}.exact"
                graph.insert_after(node, [narrow, wide])
    return model


class _Rewriting:
    """A graph while it is rewritten node by node.

    same: the new graph's value for an old value and a new type. kind: the type in which an old value was
    first made in the new graph; constants have none until a node uses them.
    """

    def __init__(self, model: ir.Model, promised: Mapping[str, ir.DataType], norms: ir.DataType) -> None:
        self.model = model
        self.promised = promised
        self.norms = norms
        self.tape = ir.tape.Tape()
        self.same: dict[tuple[ir.Value, ir.DataType | None], ir.Value] = {}
        self.kind: dict[ir.Value, ir.DataType | None] = {}

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
            new.name = value.name
            new.shape = value.shape
            outputs.append(new)
        new_graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.tape.nodes,
            initializers=self.tape.initializers,
            opset_imports=graph.opset_imports,
            name=graph.name,
        )
        return ir.Model(new_graph, ir_version=self.model.ir_version, producer_name=self.model.producer_name)

    def rewrite(self, node: ir.Node) -> None:
        """Records a node of the old graph again, with inputs of one type."""
        kinds = {self.kind.get(value) for value in node.inputs if value is not None and _is_float(value)}
        if node.op_type == NORM:
            kind = self.norms
        elif node.op_type in IN_SINGLE | LOG_PROBABILITIES:
            kind = SINGLE
        elif node.op_type in PRODUCTS:
            kind = HALF
        elif not kinds:  # it makes floats of other types, as Cast does, in the type that its attribute names
            kind = SINGLE
        else:
            kind = SINGLE if SINGLE in kinds else HALF
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
            new.dtype = kind if _is_float(old) else old.dtype
            new.shape = old.shape
            narrowed = node.op_type in IN_SINGLE and kind == SINGLE
            self.know(old, self.converted(new, HALF) if narrowed else new)

    def know(self, old: ir.Value, new: ir.Value) -> None:
        self.same[old, new.dtype] = new
        self.kind[old] = new.dtype

    def of(self, value: ir.Value, kind: ir.DataType) -> ir.Value:
        """The new graph's value for an old one: as it is, cast, or a constant. Only floats get the type
        `kind`.
        """
        wanted = kind if _is_float(value) else value.dtype
        if (value, wanted) not in self.same:
            if value.const_value is not None:
                self.same[value, wanted] = self.constant(value, wanted)
            else:
                self.same[value, wanted] = self.converted(self.same[value, self.kind[value]], kind)
        return self.same[value, wanted]

    def converted(self, value: ir.Value, kind: ir.DataType) -> ir.Value:
        new = self.tape.op("Cast", [value], {"to": kind.value})
        new.dtype = kind
        new.shape = value.shape
        return new

    def constant(self, value: ir.Value, kind: ir.DataType | None) -> ir.Value:
        """An initializer of this type; a constant that is needed in both types becomes two, under two
        names.
        """
        assert value.const_value is not None, value
        array = value.const_value.numpy()
        name = value.name
        if kind == HALF:
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
            if np.isinf(array).sum() != np.isinf(value.const_value.numpy()).sum():
                raise ArtefactError(
                    f"{name} holds values beyond 65504, the range of float16; export the run with "
                    "--precision fp32."
                )
        twice = any((value, other) in self.same for other in (HALF, SINGLE))
        return self.tape.initializer(ir.tensor(array, name=f"{name}.{array.dtype}" if twice else name))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == SINGLE
