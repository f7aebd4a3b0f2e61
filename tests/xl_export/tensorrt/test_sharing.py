"""What the attentions of all layers have in common is computed once, with the same answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from runtimes.contract.spec import GRAPH, Spec, load_spec
from runtimes.contract.tensors import head_groups
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export
from xl_export.tensorrt.network import expose_casts, inline_attention

KINDS = [
    ("transformer-xl", "ring"),
    ("transformer-xl", "shift"),
    ("all-attention-groups", "ring"),
    ("adaptive-span", "ring"),
]
ONCE = {"Range", "GreaterOrEqual", "LessOrEqual", "And", "Clip", "Expand"}  # of distances and masks


@pytest.mark.parametrize(("name", "form"), KINDS, ids=map("-".join, KINDS))
def test_distances_and_masks_are_computed_once_with_the_same_answers(
    name: str, form: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(**{"layers": 3, **ARCHITECTURES[name]})
    folder = export(run, tmp_path / "a", target="tensorrt", memory=form)  # type: ignore[arg-type]
    model = onnx.load(folder / GRAPH, load_external_data=False)
    of_one_layer = Counter(node.op_type for node in model.functions[0].node)
    shared = inline_attention(model)
    onnx.save(shared, folder / "shared.onnx")

    spec = load_spec(folder)
    lengths = {group.mem_len for layer in head_groups(spec.model, spec.rule, spec.form) for group in layer}
    others = Counter(node.op_type for node in model.graph.node)
    found = Counter(node.op_type for node in shared.graph.node)
    for kind in ONCE:
        assert found[kind] - others[kind] <= of_one_layer[kind] * len(lengths), kind

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [
        onnxruntime.InferenceSession(folder / path, options, providers=["CPUExecutionProvider"])
        for path in (GRAPH, "shared.onnx")
    ]
    for tokens in (1, spec.rule.segment):
        feed = step_inputs(spec, batch=2, tokens=tokens)
        expected, found_answers = (session.run(None, feed) for session in sessions)
        assert all(map(np.array_equal, found_answers, expected))


def test_a_mask_that_is_cast_from_integers_stays_a_mask() -> None:
    """As a traced module has it; the casts from halves are `to_half`'s."""
    text = """<ir_version: 10, opset_import: ["": 23]>
    graph (float16[1,2,3,4] q, float16[1,2,3,4] k, float16[1,2,3,4] v, int64[3,3] seen)
    => (float[1,2,3,4] y) {
        wide_q = Cast <to = 1> (q)
        wide_k = Cast <to = 1> (k)
        wide_v = Cast <to = 1> (v)
        mask = Cast <to = 9> (seen)
        y = Attention (wide_q, wide_k, wide_v, mask)
    }"""
    model = onnx.parser.parse_model(text)
    expose_casts(model.graph)
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.node[-1].input[3] == "mask"


def step_inputs(spec: Spec, *, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Inputs of a step of two streams, whose segment fits before the end of every ring."""
    draw = np.random.default_rng(0)
    axes = {"batch": batch, "tokens": tokens, "rows": batch * tokens}
    feed = {}
    for tensor in spec.inputs:
        shape = tensor.sizes(**axes)
        if tensor.name == "position_ids":
            feed[tensor.name] = np.array([[0], [1]]) + np.arange(tokens)
        elif tensor.dtype == "int64":
            feed[tensor.name] = draw.integers(0, tokens, shape)
        else:
            feed[tensor.name] = draw.normal(size=shape).astype(tensor.dtype)
    return feed
