"""The operator's forms agree: the paper's naive attention, the naive operator, and the function body in ONNX
Runtime.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from runtimes.contract.rule import MemoryRule
from trainer.model.attention import Terms
from trainer.model.naive import naive_attention
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.operator import DOMAIN, NAME, RING_NAME, VERSION, Attributes, function_body

TOLERANCES = {"float16": 3e-3, "float32": 1e-5}


def truth(case: Case) -> np.ndarray:
    """The naive operator in float64, on the case's own rounded inputs."""
    arrays = case.inputs().values()
    return naive_relative_attention(*arrays, attributes=case.attributes, mem_len=case.mem_len)


def model(
    case: Case, attributes: dict[str, int], inputs: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """One node of the operator, over a ring if there is a slot; with the case's own inputs by default."""
    inputs = with_positions(inputs or case.inputs())
    ring = "slot" in inputs
    attributes = attributes | {"mem_len": case.M, "heads": case.H}
    if ring:
        attributes["slots"] = inputs["key"].shape[2]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(case.dtype))
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in inputs.items()
    ]
    node = helper.make_node(
        RING_NAME if ring else NAME, list(inputs), ["answer"], domain=DOMAIN, **attributes
    )
    graph = helper.make_graph(
        [node], "one", values, [helper.make_tensor_value_info("answer", kind, [None] * 4)]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    body = function_body(23, ring=ring, persistent=attributes["persistent"] > 0)
    return helper.make_model(graph, functions=[body], ir_version=10, opset_imports=opsets)


def with_positions(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a node; the last one has only a shape."""
    rows, _, tokens, _ = inputs["query"].shape
    return inputs | {"positions": np.zeros((rows, tokens), np.int64)}


@pytest.mark.parametrize("name", CASES)
def test_the_function_body_in_onnx_runtime_equals_the_naive_operator(name: str) -> None:
    case = CASES[name]
    proto = model(case, asdict(case.attributes))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    answer = session.run(None, with_positions(case.inputs()))[0]
    assert answer.dtype == case.dtype
    assert np.abs(answer - truth(case)).max() < TOLERANCES[case.dtype]


@pytest.mark.parametrize(
    "rule",
    [
        MemoryRule(mem_len=11, segment=5),
        MemoryRule(mem_len=11, segment=5, mask="full", include_self=False),
        MemoryRule(mem_len=11, segment=5, initial_memory="zeros"),
    ],
    ids=str,
)
def test_the_naive_operator_equals_the_paper_s_naive_attention(rule: MemoryRule) -> None:
    """Scores over sqrt(K), u, v, r(d), a bias and the soft span mask m(d) as log m(d), persistent vectors."""
    B, H, T, M, K, N = 2, 3, 5, 11, 4, 6
    J, draw = M + T, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    query, key, value = normal(B, T, H, K), normal(B, J, H, K), normal(B, J, H, K)
    bias, gate = normal(J, H), torch.rand(J, H, generator=draw, dtype=torch.float64)
    gate[-3:] = 0
    terms = Terms(position=normal(J, H, K), bias=bias, u=normal(H, K), v=normal(H, K), gate=gate)
    persistent = normal(H, N, K), normal(H, N, K)
    first = torch.tensor([3, -2])
    i = torch.arange(T)[:, None]
    visible = rule.visible(M + i - torch.arange(J), first[:, None, None] + i, i).expand(B, T, J)
    expected = naive_attention(query, key, value, visible=visible, terms=terms, persistent=persistent)

    scale = K**-0.5
    inputs = (
        query.transpose(1, 2) * scale,
        key.transpose(1, 2),
        value.transpose(1, 2),
        first,
        terms.u[:, None] * scale,
        terms.v[:, None] * scale,
        terms.position.transpose(0, 1),
        (bias * scale + gate.log()).T,
        *persistent,
    )
    answer = naive_relative_attention(
        *(tensor.numpy() for tensor in inputs), attributes=Attributes.of(rule, persistent=N)
    )
    assert np.abs(answer.swapaxes(1, 2) - expected.numpy()).max() < 1e-12


@pytest.mark.parametrize(
    "name", ["padded-row", "persistent", "span", "zeros-before-the-text", "shared-table"]
)
def test_the_operator_over_a_ring_answers_as_over_a_memory(name: str) -> None:
    """The same keys in the slots of a ring that has room for more, at another place in every row."""
    case = CASES[name]
    inputs = case.inputs()
    expected = naive_relative_attention(*inputs.values(), attributes=case.attributes)
    B, H, T, M, K, S = case.B, case.H, case.T, case.M, case.K, case.M + case.T + 3
    inputs["slot"] = slot = np.array([(5 + 7 * row) % (S - T + 1) for row in range(B)], np.int32)
    for kind in ("key", "value"):
        ring = np.full((B, H, S, K), 9.0, inputs[kind].dtype)  # what is in the slots beyond the memory
        for row in range(B):
            ring[row, :, (slot[row] - M + np.arange(M + T)) % S] = inputs[kind][row].swapaxes(0, 1)
        inputs[kind] = ring
    found = naive_relative_attention(*inputs.values(), attributes=case.attributes, mem_len=M)
    assert np.abs(found - expected).max() < 1e-12
    proto = model(case, asdict(case.attributes), inputs)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    answer = session.run(None, with_positions(inputs))[0]
    assert np.abs(answer - expected).max() < TOLERANCES[case.dtype]


def test_attributes_say_what_the_rule_says() -> None:
    for rule in (
        MemoryRule(mem_len=7, segment=3),
        MemoryRule(mem_len=7, segment=3, mask="full", include_self=False),
    ):
        assert Attributes.of(rule).rule(mem_len=7, segment=3) == rule
    assert all(isinstance(value, int) for value in asdict(Attributes.of(rule)).values())
