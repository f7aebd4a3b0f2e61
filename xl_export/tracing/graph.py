"""Traces the step of a module into an ONNX graph with the inputs and outputs that the spec names.

`torch.export` runs the step on tensors without values and records the operators. `torch.onnx` writes them as
ONNX operators. What is left to do here: the names and shapes of the contract, and to remove what is of this
machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
import torch

from runtimes.base.errors import ArtefactError, ConfigError, first_line, needs
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import POSITIONS, TensorSpec
from xl_export.graph.ops import IR_VERSION, TYPES, constant, quiet, remove_unused_nodes
from xl_export.graph.unrolled import Roles, unrolled
from xl_export.tracing import recurrent
from xl_export.tracing.module import LOGITS, ModuleStep
from xl_export.tracing.products import multiply_convolutions, order_products, put_constants_last
from xl_export.tracing.progress import stage
from xl_export.tracing.refusal import noted_guards, why
from xl_export.tracing.ring import translations
from xl_export.tracing.session import HIDDEN, GraphStep, OutputLayer
from xl_export.tracing.views import drop_softplus_thresholds, join_views

SHORTEST = 8  # tokens, where a segment of the rule has two
SLOW = (
    "PyTorch takes long to trace a step for any number of rows; if one stream at a time is enough, rows=1 is "
    "much faster."
)
EXAMPLE = (3, 5, 4)  # batch, tokens and rows while tracing: sizes that nothing else has by chance
# TensorRT has no such operators, or only for sizes that it can bound while it builds an engine.
NOT_FOR_ENGINES = {
    "NonZero": "makes shapes that depend on tokens",
    "TensorScatter": "writes in a circle",
    "Unique": "makes shapes that depend on values",
    "Compress": "makes shapes that depend on values",
}


def traced_graph(step: ModuleStep, spec: Spec, tokens: int | None = None) -> ir.Model:
    """The ONNX model of one step of a module, in float32 but for the memory tensors.

    tokens: of a step of fixed sizes; None for a whole segment.

    Raises MissingPackageError without onnxscript, and ArtefactError where the step cannot be traced or where
    its operators do not fit the target.
    """
    return _traced(GraphStep(step, spec), spec, tokens)


def several_steps(step: ModuleStep, spec: Spec, tokens: int, body: ir.Model) -> ir.Model:
    """The same for a multiple of the tokens of the module's own step.

    body: of `traced_body`; it is changed.
    """
    assert step.step_tokens is not None
    inside = _body_spec(step, spec)
    if (count := tokens // step.step_tokens) > 1:
        timed, outputs = ([x.name for x in side if "tokens" in x.shape] for side in inside.signature)
        unrolled(body, count, Roles(timed, outputs, len(spec.state)))
        remove_unused_nodes(body)
        _name(body, inside, tokens)
    if spec.model.selective:
        output = dataclasses.replace(
            spec,
            inputs=(inside.outputs[0], *(x for x in spec.inputs if x.name in ("targets", "logit_rows"))),
            outputs=spec.signature[1],
        )
        _join(body.graph, _traced(OutputLayer(step, spec), output, tokens).graph, spec)
        _name(body, spec, tokens)
    _refuse_unfit(body, spec)
    return body


def traced_body(step: ModuleStep, spec: Spec) -> ir.Model:
    """The ONNX model of the module's own step of `step_tokens` tokens, for `several_steps`."""
    inside = _body_spec(step, spec)
    return _traced(GraphStep(step, inside), inside, step.step_tokens)


def _body_spec(step: ModuleStep, spec: Spec) -> Spec:
    """The spec of a step that ends before the output layer, where that reads all tokens at once."""
    if not spec.model.selective:
        return spec
    tokens = torch.zeros(step.rows or 1, 1, dtype=torch.long)
    with torch.no_grad():
        width = step({"input_ids": tokens}, tokens, step.start(len(tokens)))[0][LOGITS].shape[2]
    hidden = TensorSpec(name=HIDDEN, dtype="float32", shape=("batch", "tokens", width))
    return dataclasses.replace(
        spec,
        inputs=tuple(x for x in spec.inputs if x.name not in ("targets", "logit_rows")),
        outputs=(hidden, *spec.outputs[len(spec.signature[1]) :]),
    )


def _join(graph: ir.Graph, output: ir.Graph, spec: Spec) -> None:
    """Moves the output layer behind the hidden state, which is the first output of the graph."""
    taken = {value.name for value in _values(graph)}
    constants = list(output.initializers.values())
    for value in list(_values(output)):
        if value.name in taken:
            _rename(value, f"output.{value.name}")
    hidden, *others = output.inputs
    hidden.replace_all_uses_with(graph.outputs[0])
    results = list(output.outputs)
    output.inputs.clear()
    output.outputs.clear()
    output.initializers.clear()
    nodes = list(output)
    for node in nodes:
        node.name = f"output.{node.name}"
    output.remove(nodes)
    graph.extend(nodes)
    for value in constants:
        graph.register_initializer(value)
    count = len(graph.inputs) - len(spec.state)
    graph.inputs[count:count] = others
    graph.outputs[:1] = results


def _traced(step: GraphStep, spec: Spec, tokens: int | None) -> ir.Model:
    """The ONNX model of a part of a step that has the inputs and outputs of this spec."""
    with needs("trace", "onnxscript"):
        import onnxscript  # noqa: F401
    advice = None if spec.fixed_rows or spec.model.selective else SLOW
    # If it fails, PyTorch prints the whole step.
    with stage("tracing", advice=advice) as begins, torch.no_grad(), quiet():
        begins("recording the operators of PyTorch")
        program = _exported(step, spec, tokens)
        begins("writing them as operators of ONNX")
        model = _as_onnx(program, spec)
    _forget_this_machine(model, spec)
    drop_softplus_thresholds(model.graph)
    multiply_convolutions(model.graph)
    put_constants_last(model.graph)
    order_products(model.graph)
    join_views(model.graph)
    _widen_masks(model.graph)
    _name(model, spec, tokens)
    _read_sizes_of_tokens(model.graph, memory=len(spec.state))
    _split_constants(model.graph)
    _transpose_constants(model.graph)
    remove_unused_nodes(model)
    _refuse_unfit(model, spec)
    return model


def _exported(step: GraphStep, spec: Spec, tokens: int | None) -> torch.export.ExportedProgram:
    batch, segment, rows = EXAMPLE
    longest = longest_traced(spec.rule)
    axes = {"batch": batch, "tokens": min(segment, longest), "rows": rows}
    sizes = [spec.graph_shape(fact, tokens) for fact in spec.inputs]
    examples = [
        torch.zeros([axes.get(str(size)) or int(size) for size in shape], dtype=getattr(torch, fact.dtype))
        for shape, fact in zip(sizes, spec.inputs, strict=True)
    ]
    dims = {"batch": torch.export.Dim("batch"), "rows": torch.export.Dim("rows")}
    if longest > 1:
        dims["tokens"] = torch.export.Dim("tokens", max=longest)
    shapes = tuple(
        {axis: dims[str(size)] for axis, size in enumerate(shape) if size in dims} for shape in sizes
    )
    with noted_guards() as guards:
        try:
            # A condition on sizes that PyTorch cannot prove, such as one of the view in the published
            # relative shift, becomes an assert in the graph, which torch.onnx drops. If it does not hold for
            # some size, the comparison with the module finds out.
            return torch.export.export(
                step,
                tuple(examples),
                dynamic_shapes=(shapes,),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except Exception as error:  # PyTorch raises errors of a dozen classes for what it cannot trace
            raise ArtefactError(why(error, guards, spec)) from error


def longest_traced(rule: MemoryRule) -> int:
    """The most tokens of a step while it is traced: an axis of at most 2 would become a constant."""
    return SHORTEST if rule.segment == 2 else rule.segment


def _as_onnx(program: torch.export.ExportedProgram, spec: Spec) -> ir.Model:
    try:
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=spec.opset,
            verbose=False,
            optimize=True,
            custom_translation_table=recurrent.translations() | (translations() if spec.circular else {}),
        )
        assert made is not None, "torch.onnx gave no program"
        model: ir.Model = made.model
        return model
    except Exception as error:  # as above; an operator without a translation is the usual one
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ArtefactError(
            f"torch.onnx could not write the step as ONNX operators ({type(cause).__name__}: "
            f"{first_line(Exception(str(cause))):.300}); write it with other operators of PyTorch."
        ) from error


def _name(model: ir.Model, spec: Spec, tokens: int | None) -> None:
    """Gives inputs and outputs the names, types and shapes of the contract."""
    graph = model.graph
    if len(graph.inputs) != len(spec.inputs) or len(graph.outputs) != len(spec.outputs):
        raise ArtefactError(
            f"the step returns {len(graph.outputs)} tensors and reads {len(graph.inputs)}; expected "
            f"{len(spec.outputs)} and {len(spec.inputs)}: as many memory tensors as `start` returns."
        )
    _separate_outputs(graph)
    rows = graph.inputs[0].shape[0]  # type: ignore[index]
    taken: set[str | None] = {fact.name for fact in (*spec.inputs, *spec.outputs)}
    for number, value in enumerate(list(_values(graph))):
        if value.name in taken:
            _rename(value, f"{value.name}.{number}")
        taken.add(value.name)
    for value, fact in zip(graph.inputs, spec.inputs, strict=True):
        value.name = fact.name
        value.shape = ir.Shape(spec.graph_shape(fact, tokens))
    for number, (value, fact) in enumerate(zip(list(graph.outputs), spec.outputs, strict=True)):
        if value.dtype not in (None, TYPES[fact.dtype]):
            raise ArtefactError(
                f"the step gives {fact.name} as {value.dtype}; expected {fact.dtype}: convert it in the "
                "module."
            )
        expected = spec.graph_shape(fact, tokens)
        if spec.rule.segment == 1 and "tokens" in expected:
            _refuse_other_shape(value, fact.name, [1 if size == "tokens" else size for size in expected])
            value = _with_tokens(graph, number)
        else:
            _refuse_other_shape(value, fact.name, expected)
        value.name = fact.name
        value.dtype = TYPES[fact.dtype]
        value.shape = ir.Shape(expected)
    graph.name = "step"
    for value in _values(graph):  # PyTorch calls the number of rows `s7`, or the like
        if value.shape is not None and not isinstance(rows, int):
            value.shape = ir.Shape(["batch" if size == rows else size for size in value.shape])


def _with_tokens(graph: ir.Graph, number: int) -> ir.Value:
    """Lets an output [batch, 1, …] have the number of tokens of the positions as its second size.

    The number is 1 while the step is traced, so PyTorch makes it a constant. Runtimes compare the shapes of
    the graph with the spec, in which the size has a name.
    """
    value = graph.outputs[number]
    positions = next(each for each in graph.inputs if each.name == POSITIONS)
    assert value.shape is not None
    rest = [int(size) for size in value.shape[2:]]  # type: ignore[arg-type]
    sizes = ir.node("Shape", [positions])
    others = constant(graph, f"sizes.{number}", np.array(rest, np.int64))
    shape = ir.node("Concat", [sizes.outputs[0], others], {"axis": 0})
    reshape = ir.node("Reshape", [value, shape.outputs[0]])
    graph.extend([sizes, shape, reshape])
    graph.outputs[number] = reshape.outputs[0]
    return reshape.outputs[0]


def _refuse_other_shape(value: ir.Value, name: str, expected: Sequence[int | str]) -> None:
    """Raises ArtefactError where PyTorch knows a size of an output, and it is not the one of the contract."""
    if value.shape is None:
        return
    found = [size if isinstance(size, int) else None for size in value.shape]
    wanted = [size if isinstance(size, int) else None for size in expected]
    wrong = len(found) != len(wanted) or any(
        have is not None and have != want for have, want in zip(found, wanted, strict=False)
    )
    if wrong:
        raise ArtefactError(
            f"the step gives {name} as {value.shape}; expected [{', '.join(map(str, expected))}]: a size "
            "that the spec names must vary, and the others must not change from step to step."
        )


def _separate_outputs(graph: ir.Graph) -> None:
    """Puts an Identity behind outputs that are inputs, constants or the same value twice."""
    seen: set[ir.Value] = set()
    for number, value in enumerate(graph.outputs):
        if value.producer() is None or value in seen:
            node = ir.node("Identity", [value])
            graph.append(node)
            node.outputs[0].type = value.type
            node.outputs[0].shape = value.shape
            graph.outputs[number] = node.outputs[0]
        seen.add(graph.outputs[number])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _read_sizes_of_tokens(graph: ir.Graph, *, memory: int) -> None:
    """Takes the number of rows from the tokens, not from the last inputs: a ring may have no second reader.

    memory: how many of the inputs are memory tensors.
    """
    tokens, *others = graph.inputs
    for value in others[len(others) - memory :]:
        for node, index in list(value.uses()):
            first, last = (
                node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", -1))
            )
            if node.op_type == "Shape" and (first, last) == (0, 1):
                node.replace_input_with(index, tokens)


def _widen_masks(graph: ir.Graph) -> None:
    """Gives a mask of keys a row for each query: ONNX Runtime's Attention does not repeat one row for all."""
    for node in list(graph):
        if node.op_type != "Attention" or len(node.inputs) < 4:
            continue
        query, mask = node.inputs[0], node.inputs[3]
        assert query is not None
        if (
            mask is None
            or mask.shape is None
            or mask.shape[-2] != 1
            or (query.shape is not None and query.shape[-2] == 1)
        ):
            continue
        ones = [constant(graph, f"{mask.name}.{n}", np.ones(n, np.int64)) for n in (len(mask.shape) - 2, 1)]
        queries = ir.node("Shape", [query], {"start": -2, "end": -1})
        sizes = ir.node("Concat", [ones[0], queries.outputs[0], ones[1]], {"axis": 0})
        wide = ir.node("Expand", [mask, sizes.outputs[0]])
        wide.outputs[0].type = mask.type
        graph.insert_before(node, [queries, sizes, wide])
        node.replace_input_with(3, wide.outputs[0])


def _split_constants(graph: ir.Graph) -> None:
    """Stores the parts of constants that only a Split reads, as of the matrix of nn.MultiheadAttention.

    Otherwise a product would not multiply by a constant, and its weights could not be quantised.
    """
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Split" else None
        if value is None or value.const_value is None or len(list(value.uses())) > 1:
            continue
        sizes = [int(out.shape[node.attributes.get_int("axis", 0)]) for out in node.outputs]  # type: ignore
        parts = np.split(value.const_value.numpy(), np.cumsum(sizes)[:-1], node.attributes.get_int("axis", 0))
        for number, (out, part) in enumerate(zip(node.outputs, parts, strict=True)):
            out.replace_all_uses_with(constant(graph, f"{value.name}.{number}", part))
        graph.remove(node, safe=True)
        del graph.initializers[str(value.name)]


def _transpose_constants(graph: ir.Graph) -> None:
    """Stores constants as a Transpose gives them that is their only reader."""
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        if value is None or value.const_value is None or len(list(value.uses())) > 1:
            continue
        array = value.const_value.numpy().transpose(node.attributes.get_ints("perm"))
        node.outputs[0].replace_all_uses_with(constant(graph, f"{value.name}.T", array))
        graph.remove(node, safe=True)
        del graph.initializers[str(value.name)]


def _forget_this_machine(model: ir.Model, spec: Spec) -> None:
    """Removes what names this machine, such as paths, and gives constants the names of the module."""
    model.metadata_props.clear()
    model.doc_string = None
    model.producer_name = "xl-export"
    model.producer_version = None
    model.ir_version = IR_VERSION
    graph = model.graph
    graph.metadata_props.clear()
    graph.doc_string = None
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    for value in list(_values(graph)):
        value.metadata_props.clear()
        value.doc_string = None
        if value.is_initializer() and value.name is not None and value.name.startswith("module."):
            _rename(value, value.name.removeprefix("module."))
    ids = [
        x for x, fact in zip(graph.inputs, spec.inputs, strict=False) if fact.ids or fact.name == "input_ids"
    ]
    for value in list(graph.initializers.values()):
        embeds = any(node.op_type == "Gather" and node.inputs[1] in ids for node, _ in value.uses())
        if embeds and not str(value.name).startswith("vocabulary."):  # quantisation knows tables by this name
            _rename(value, f"vocabulary.{value.name}")


def _rename(value: ir.Value, name: str) -> None:
    value.name = name
    if value.const_value is not None:
        value.const_value.name = name


def _refuse_unfit(model: ir.Model, spec: Spec) -> None:
    """Raises an error for a graph that no runtime of this project would run as the spec says."""
    graph = model.graph
    if model.opset_imports.get("") != spec.opset:
        raise ArtefactError(
            f"torch.onnx wrote opset {model.opset_imports.get('')}; expected {spec.opset}: install a newer "
            "PyTorch and onnxscript."
        )
    if domains := {node.domain for node in graph.all_nodes()} - {""}:
        raise ArtefactError(
            f"the traced step has operators of {', '.join(sorted(domains))}, and an artefact has only "
            "standard ones; write the step without them."
        )
    if model.functions:
        raise ArtefactError("the traced step has functions of its own; write the step without them.")
    for node in graph.all_nodes():
        if node.op_type in ("Loop", "Scan", "SequenceMap", "If"):
            raise ArtefactError(
                f"the traced step has a {node.op_type} operator, and a step has none; write it without loops "
                "and branches over tensors."
            )
        if spec.target == "tensorrt" and node.op_type in NOT_FOR_ENGINES:
            raise ConfigError(
                f"the traced step has a {node.op_type} operator, which {NOT_FOR_ENGINES[node.op_type]}, "
                "and TensorRT does not take it; write it without, or leave out target tensorrt."
            )
    if spec.circular:
        for past, present in zip(
            graph.inputs[-len(spec.state) :], graph.outputs[-len(spec.state) :], strict=True
        ):
            uses = list(past.uses())
            if (
                len(uses) != 1
                or uses[0][0] is not present.producer()
                or uses[0][0].op_type != "TensorScatter"
            ):
                raise ArtefactError(
                    f"{past.name} is not written only by xl_export.ring_write, and a ring is written in "
                    "place; read its result in the place of the memory, or use another form."
                )
