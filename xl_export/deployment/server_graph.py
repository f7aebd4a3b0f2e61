"""The step graph for Triton Inference Server, which keeps the memory of every stream between its requests.

The server feeds each state output back as a state input. The position of a stream is such a state here, so
that a client sends tokens, or the inputs of a step, and nothing else. At the START of a sequence the graph
itself sets the position to 0. That is all a new text needs: what comes before position 0 is masked, or
replaced by the initial memory. So what the server left in the memory of an earlier stream is never seen.

The server pairs state inputs with state outputs by their places in alphabetical order, not by the pairs of
its configuration (triton-inference-server/server#8586). Here both names of a pair are a constant prefix and
the same key, and numbers in keys have equal width. So both orders are the same, even if one name is a prefix
of another, as with the keys of memory in int8 and their scales.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import counted
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import POSITIONS, TensorSpec
from xl_export.graph.ops import TYPES, Ops, graph_input

START = "START"  # the control input: 1 for the first request of a sequence
READ = "past."  # prefix of the names of state inputs
WRITTEN = "present."  # prefix of the names of state outputs
NUMBER_WIDTH = 4  # digits of layer numbers in keys


@dataclass(frozen=True, kw_only=True)
class SequenceGraph:
    """A model for the server, and its tensors."""

    model: ir.Model
    inputs: tuple[TensorSpec, ...]  # that a client sends
    outputs: tuple[TensorSpec, ...]  # that a client gets
    control: TensorSpec  # the input that the server sets
    states: tuple[tuple[TensorSpec, TensorSpec], ...]
    """The input and output of each memory tensor, and of the position at the end."""

    @property
    def all_inputs(self) -> tuple[TensorSpec, ...]:
        """Every input of the graph."""
        return (*self.inputs, self.control, *(read for read, _ in self.states))


def sequence_graph(model: ir.Model, spec: Spec) -> SequenceGraph:
    """Returns the step graph of an artefact as a graph for the server; `model` itself is changed.

    The client's inputs are `input_ids` int64 [B, T] and, with a large vocabulary, `targets`. Its outputs are
    the logits, [B, T, V] or with a large vocabulary [B, V] of the last token, and `log_probs`. A step that is
    no language model has its own inputs and outputs. A segment longer than the artefact's, or that begins
    where the artefact does not promise it, is an error of the graph. Raises ConfigError for an artefact whose
    ring cannot be written across its end, since a client does not know where that is, for memory tensors of
    no size, and for other sizes that the server does not accept.
    """
    if spec.linear_ring:
        raise ConfigError(
            "the artefact has a ring for TensorRT, whose segments are cut at its end, and Triton Inference "
            "Server cuts none; export it with --memory shift."
        )
    if any(0 in state.shape for state in spec.state):
        raise ConfigError(
            "the artefact has memory tensors of no tokens, which Triton Inference Server does not take; "
            "export it with --memory ring."
        )
    if spec.fixed_rows is not None:
        raise ConfigError(
            f"the artefact was exported for exactly {counted(spec.fixed_rows, 'row')}, and Triton Inference "
            "Server steps a varying number of streams; export it without `rows`."
        )
    dropped = {POSITIONS, "logit_rows"}
    inputs = [fact for fact in spec.signature[0] if fact.name not in dropped]
    outputs = list(spec.signature[1])
    if single := [fact.name for fact in (*inputs, *outputs) if len(fact.shape) == 1]:
        raise ConfigError(
            f"{single[0]} has one number for each stream, and Triton Inference Server demands a size; give "
            "it one, such as constant(1)."
        )
    graph = model.graph
    op = Ops()
    values = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    control = TensorSpec(name=START, dtype="int32", shape=("batch", 1))
    position = _state("position", "int64", ("batch", 1))
    start = graph_input(control)
    past_position = graph_input(position[0])

    tokens = values[next(fact.name for fact in spec.signature[0] if "tokens" in fact.shape)]
    length = op.Shape(tokens, start=1, end=2)
    begins = op.Cast(start, to=int(ir.DataType.BOOL))
    at = op.Where(begins, op.constant(np.array(0)), past_position)
    # There is one offset for each token that a segment may have, so the Reshape fails for a longer segment,
    # which would overwrite memory that is still needed.
    offsets = op.constant(np.arange(spec.rule.segment), "offsets")
    shape = length
    if "cuts" in spec.without:  # the Reshape also fails for a step that does not begin with a segment
        within = op.Mod(at, op.constant(np.array(spec.rule.segment)))
        shape = op.Add(length, op.Reshape(op.ReduceMax(within, keepdims=0), op.constant(np.array([1]))))
    ids = op.Add(at, op.Reshape(op.Slice(offsets, op.constant(np.array([0])), length), shape))
    following = op.Add(at, length)
    _typed(following, position[1])
    values[POSITIONS].replace_all_uses_with(ids)
    if spec.model.selective:  # the last token of each row; other rows cannot be batched by the server
        one = op.constant(np.array(1))
        rows = op.Range(one, op.Add(op.Squeeze(op.Shape(tokens, start=0, end=1)), one), one)
        last = op.Sub(op.Mul(rows, op.Squeeze(length)), one)
        values["logit_rows"].replace_all_uses_with(last)
        outputs[0] = TensorSpec(name="logits", dtype="float32", shape=("batch", outputs[0].shape[1]))
        values["logits"].shape = ir.Shape(["batch", outputs[0].shape[1]])

    states = []
    for state in spec.state:
        pair = _state(_key(state.name), state.dtype, state.shape)
        values[state.name].name = pair[0].name
        values[str(state.present)].name = pair[1].name
        states.append(pair)
    _take_over(graph, op)
    kept = [value for value in graph.inputs if value.name not in dropped]
    clients = len(inputs)
    graph.inputs[:] = [*kept[:clients], start, *kept[clients:], past_position]
    graph.outputs.append(following)
    return SequenceGraph(
        model=model,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        control=control,
        states=(*states, position),
    )


def _key(past: str) -> str:
    """Returns the name of a memory tensor without its beginning, its numbers filled with zeros."""
    key = re.sub(r"^past_", "", past)
    return re.sub(r"\d+", lambda number: number[0].zfill(NUMBER_WIDTH), key)


def _state(key: str, dtype: str, shape: tuple[int | str, ...]) -> tuple[TensorSpec, TensorSpec]:
    read, written = (
        TensorSpec(name=beginning + key, dtype=dtype, shape=shape)  # type: ignore[arg-type]
        for beginning in (READ, WRITTEN)
    )
    return read, written


def _typed(value: ir.Value, fact: TensorSpec) -> None:
    made = graph_input(fact)
    value.name = made.name
    value.shape = made.shape
    value.dtype = TYPES[fact.dtype]


def _take_over(graph: ir.Graph, op: Ops) -> None:
    """Puts what was recorded before a graph, under names that the graph does not have."""
    for number, node in enumerate(reversed(op.nodes)):
        for value in node.outputs:
            value.name = value.name or f"server.{number}"
        graph.insert_before(graph[0], node)
    for value in op.initializers:
        assert value.const_value is not None, value
        value.name = value.const_value.name = f"server.{value.name}"
        graph.register_initializer(value)
