"""The graph of several steps, made of the graph of one.

A loop over tokens would compute everything one token after another, though only what depends on the memory
has to wait. So each node whose results do not reach an earlier node through the memory is computed once, for
all tokens together, as if they were rows: T tokens of B rows are T x B rows of one token. The other nodes are
repeated for each token. Of a Mamba, only its two recurrences remain: all matrices are read once for T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx  # type: ignore[import-untyped]
import numpy as np
import onnx_ir as ir

from xl_export.graph.ops import constant
from xl_export.graph.sizes import broadcast

BATCH = "batch"
ROWS = "batch_tokens"  # of all tokens


@dataclass(frozen=True)
class Roles:
    """What the inputs and outputs of a graph are."""

    timed: Sequence[str]
    """The inputs [batch, tokens, …]."""
    timed_outputs: Sequence[str]
    memory: int
    """How many of the last inputs and outputs are memory, in the same order."""


def unrolled(model: ir.Model, count: int, roles: Roles) -> ir.Model:
    """The model itself, which now takes `count` times as many tokens in a step.

    Its shapes name the number of rows `batch`, and its number of tokens is fixed. Rows are independent.
    Inputs, outputs and their shapes are not named again.
    """
    _read_rows_of(model.graph, roles.timed[0])
    _hide_by_factors(model.graph.inputs[len(model.graph.inputs) - roles.memory :])
    _Unrolling(model.graph, count, roles).rewrite()
    model.graph.sort()
    return model


def _read_rows_of(graph: ir.Graph, name: str) -> None:
    """Lets every Shape that asks for the number of rows read it from one input; other sizes are constants."""
    rows = next(value for value in graph.inputs if value.name == name)
    for node in list(graph):
        value = node.inputs[0]
        if node.op_type != "Shape" or value is None or value.shape is None:
            continue
        sizes = list(value.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
        if not all(isinstance(size, int) or size == BATCH for size in sizes):
            continue
        parts = []
        for place, size in enumerate(sizes):
            if isinstance(size, int):
                parts.append(constant(graph, f"{node.outputs[0].name}.{place}", np.array([size])))
            else:
                shape = ir.node("Shape", [rows], {"start": 0, "end": 1})
                graph.insert_before(node, shape)
                parts.append(shape.outputs[0])
        joined = ir.node("Concat", parts, {"axis": 0})
        graph.insert_before(node, joined)
        node.outputs[0].replace_all_uses_with(joined.outputs[0])
        graph.remove(node, safe=True)


def _hide_by_factors(memory: Sequence[ir.Value]) -> None:
    """Lets (c ? h : 0) a, where h is from the memory, be h (c ? a : 0), of which the last part need not wait.

    It is the same for a memory without NaN and infinities, and no other may be fed.
    """
    for past in memory:
        hidden = _only_reader(past, "Where")
        product = hidden and _only_reader(hidden.outputs[0], "Mul")
        if not (hidden and product and hidden.inputs[1] is past):
            continue
        zero = None if hidden.inputs[2] is None else hidden.inputs[2].const_value
        other = 1 - list(product.inputs).index(hidden.outputs[0])
        if zero is None or zero.numpy().any() or product.inputs[other] is hidden.outputs[0]:
            continue
        factor = ir.node("Where", [hidden.inputs[0], product.inputs[other], hidden.inputs[2]])
        product.append(factor)  # nodes are sorted at the end
        factor.outputs[0].type = product.outputs[0].type
        sizes = broadcast(hidden.inputs[0], product.inputs[other])
        factor.outputs[0].shape = None if sizes is None else ir.Shape(sizes)
        product.replace_input_with(other, factor.outputs[0])
        product.replace_input_with(1 - other, past)


def _only_reader(value: ir.Value, kind: str) -> ir.Node | None:
    readers = [node for node, _ in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


class _Unrolling:
    """Nodes are `together` for all tokens, or `each` for each token. `sizes` follow from the number of rows
    only, and constants are neither.
    """

    def __init__(self, graph: ir.Graph, count: int, roles: Roles) -> None:
        self.graph = graph
        self.count = count
        self.roles = roles
        first = len(graph.inputs) - roles.memory
        self.inputs = list(graph.inputs[:first])
        presents = graph.outputs[len(graph.outputs) - roles.memory :]
        self.present = dict(zip(graph.inputs[first:], presents, strict=True))
        self.added: list[ir.Node] = []
        self.pieces_of: dict[ir.Value, Sequence[ir.Value]] = {}
        self.whole_of: dict[ir.Value, ir.Value] = {}
        self.sizes: dict[ir.Node, None] = {}  # a set in order
        self.varying: dict[ir.Node, None] = {}
        constants: set[ir.Node] = set()
        known: set[ir.Node] = set()  # constants and sizes
        for node in graph:
            read = [x for x in node.inputs if x is not None and not x.is_initializer()]
            makers = {x.producer() for x in read}
            if makers <= constants:
                constants.add(node)
                known.add(node)
            elif (node.op_type == "Shape" and read[0] in self.inputs) or makers <= known:
                self.sizes[node] = None
                known.add(node)
            else:
                self.varying[node] = None
        self.each = self._that_wait()
        self.copies = {node: [_copied(node) for _ in range(count)] for node in self.each}
        self.sized = {node: _copied(node) for node in self.sizes}

    def _that_wait(self) -> set[ir.Node]:
        """The nodes whose results reach themselves through the memory, and those that only fit to them."""
        reads = networkx.DiGraph()
        for node in self.varying:
            for value in node.inputs:
                if value is not None:
                    reads.add_edge(node, value)
            for value in node.outputs:
                reads.add_edge(value, node)
        for past, present in self.present.items():
            reads.add_edge(past, present)
        if _axis(self.inputs[0]) is None:
            return set(self.varying)  # the step takes no other number of rows
        circles = (group for group in networkx.strongly_connected_components(reads) if len(group) > 1)
        found = {each for group in circles for each in group if isinstance(each, ir.Node)}
        before = -1
        while before != (before := len(found)):  # rows of a value without an axis of its own cannot be split
            for node in self.varying:
                for value in node.inputs:
                    maker = None if value is None else value.producer()
                    if value is None or maker is None or maker not in self.varying:
                        continue
                    if (maker in found) != (node in found) and _axis(value) is None:
                        found |= {maker, node}
        return found

    def rewrite(self) -> None:
        ends = [self._end(x) for x in self.graph.outputs]
        for node in (*self.varying, *self.sizes):
            if node not in self.each:
                _replace_inputs(node, self._together)
                for value in node.outputs:  # ONNX Runtime shares buffers among shapes of the same names
                    if value.shape is not None:
                        value.shape = ir.Shape([ROWS if size == BATCH else size for size in value.shape])
        for each in self.copies.values():
            for token, copy in enumerate(each):
                _replace_inputs(copy, partial(self._at, token=token))
        for copy in self.sized.values():
            _replace_inputs(copy, partial(self._at, token=0))
        copies = [copy for each in self.copies.values() for copy in each]
        self.graph.extend((*self.added, *copies, *self.sized.values()))
        for number, value in enumerate(ends):
            self.graph.outputs[number] = value
        self.graph.remove(list(self.each))

    def _end(self, value: ir.Value) -> ir.Value:
        """An output of all tokens, or of the last one."""
        timed = value.name in self.roles.timed_outputs
        return self._timed(value) if timed else self._at(value, self.count - 1)

    def _at(self, value: ir.Value, token: int) -> ir.Value:
        """The value of one token."""
        if value.is_initializer():
            return value
        if value in self.present:
            return self._at(self.present[value], token - 1) if token else value
        node = value.producer()
        if node is None:
            timed = value.name in self.roles.timed
            return self._pieces(value)[token] if timed else value
        if node in self.copies:
            return self.copies[node][token].outputs[node.outputs.index(value)]
        if node in self.sized:
            return self.sized[node].outputs[node.outputs.index(value)]
        return self._pieces(value)[token] if node in self.varying else value

    def _together(self, value: ir.Value) -> ir.Value:
        """The values of all tokens, as rows."""
        if value.is_initializer():
            return value
        node = value.producer()
        if node is not None and node not in self.copies:
            return value
        if value not in self.whole_of:
            if node is None and value.name in self.roles.timed:
                whole = self._as_rows(value)
            else:
                axis = 0 if node is None else _axis(value)
                whole = self._new("Concat", [self._at(value, t) for t in range(self.count)], axis=axis)
            self.whole_of[value] = whole
        return self.whole_of[value]

    def _as_rows(self, value: ir.Value) -> ir.Value:
        """[B, T k, …] as [T B, k, …]."""
        tokens, *rest = _numbers(value)
        apart = self._shaped(value, [0, self.count, tokens, *rest])
        first = self._new("Transpose", [apart], perm=[1, 0, *range(2, 3 + len(rest))])
        return self._shaped(first, [-1, tokens, *rest])

    def _timed(self, value: ir.Value) -> ir.Value:
        """[B, T k, …] of the output of all tokens."""
        node = value.producer()
        if node in self.copies or node not in self.varying:  # the same for all tokens
            return self._new("Concat", [self._at(value, t) for t in range(self.count)], axis=1)
        tokens, *rest = _numbers(value)
        apart = self._shaped(value, [self.count, -1, tokens, *rest])
        rows = self._new("Transpose", [apart], perm=[1, 0, *range(2, 3 + len(rest))])
        return self._shaped(rows, [0, self.count * tokens, *rest])

    def _shaped(self, value: ir.Value, sizes: Sequence[int]) -> ir.Value:
        shape = constant(self.graph, f"sizes.unrolled.{len(self.added)}", np.array(sizes, np.int64))
        return self._new("Reshape", [value, shape])

    def _pieces(self, value: ir.Value) -> Sequence[ir.Value]:
        """The values of each token of an input, or of what is computed for all tokens."""
        if value not in self.pieces_of:
            axis = 1 if value.producer() is None else _axis(value)
            pieces = {"axis": axis, "num_outputs": self.count}
            self.added.append(ir.node("Split", [value], pieces, num_outputs=self.count))
            self.pieces_of[value] = self.added[-1].outputs
        return self.pieces_of[value]

    def _new(self, kind: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        self.added.append(ir.node(kind, inputs, attributes))
        return self.added[-1].outputs[0]


def _numbers(value: ir.Value) -> list[int]:
    """The sizes of a value after the rows."""
    assert value.shape is not None
    return [int(size) for size in value.shape[1:]]  # type: ignore[arg-type]


def _axis(value: ir.Value) -> int | None:
    """The axis of the rows; None if there is none, or another size depends on the number of rows too."""
    named = [(axis, size) for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]
    return named[0][0] if len(named) == 1 and str(named[0][1]) in (BATCH, ROWS) else None


def _copied(node: ir.Node) -> ir.Node:
    return ir.Node(node.domain, node.op_type, node.inputs, node.attributes, num_outputs=len(node.outputs))


def _replace_inputs(node: ir.Node, by: Callable[[ir.Value], ir.Value]) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None:
            node.replace_input_with(index, by(value))
