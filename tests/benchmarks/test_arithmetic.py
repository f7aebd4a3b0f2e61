"""The formulas against numbers made by hand, and against the products that the graphs really hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from benchmarks.arithmetic import needed_multiply_adds, step_bytes
from benchmarks.cases import sliding_window
from benchmarks.cases.sliding_window import WindowGraph, window_multiply_adds
from benchmarks.models import random_weights
from runtimes.contract.memory_identity import MemoryIdentity
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import FORMS
from trainer.model.arithmetic import step_multiply_adds, training_multiply_adds, with_head
from trainer.model.config import ModelConfig
from trainer.model.model import count_parameters
from trainer.run.config import TrainConfig, built_in
from xl_export.graph.ops import OPSETS
from xl_export.graph.step import StepGraph

MODEL = ModelConfig(layers=2, d_model=4, heads=1, head_dim=2, d_ff=3, vocab_size=5)
RULE = MemoryRule(mem_len=6, segment=3)


# Tokens of the held-out part, and of the vocabulary, of the corpora that recipes are for.
HELD_OUT = {
    "enwik8": (5_000_000, 205),
    "text8": (5_000_000, 27),
    "wikitext-103": (217_646, 267_735),
    "one-billion-word": (165_000, 793_471),
    "penn-treebank": (73_760, 10_000),
}


def test_training_against_numbers_made_by_hand() -> None:
    """Two lanes, M 6 and T 3."""
    layer = 4 * 2 * (2 * 3 + 2 * 9) + 2 * 4 * 3 * 3 + 3 * 2 * (2 * 9 + 7)
    assert training_multiply_adds(MODEL, RULE, 2) == 3 * 2 * (2 * layer + 3 * 4 * 5)


def share(name: str) -> float:
    """Multiply-adds of all validations of a recipe divided by the multiply-adds of its training steps."""
    config = TrainConfig.load(name)
    held_out, vocab_size = HELD_OUT[config.corpus]
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    rule = config.validation
    each = min(held_out, config.validate_tokens or held_out)
    scored = -(-config.steps // config.validate_every) * each + (held_out if each < held_out else 0)
    validations = scored * step_multiply_adds(with_head(model), rule, "shift", rule.segment) / rule.segment
    return validations / (config.steps * training_multiply_adds(model, config.training, config.batch))


@pytest.mark.parametrize("name", [name for name in built_in() if TrainConfig.load(name).corpus])
def test_validation_takes_less_than_a_fiftieth_of_training(name: str) -> None:
    assert share(name) < 0.02


@pytest.mark.parametrize(
    ("rule", "pairs"),
    [
        (RULE, 3 * 7),
        (MemoryRule(mem_len=6, segment=3, mask="full"), 7 + 8 + 9),
        (MemoryRule(mem_len=6, segment=3, include_self=False), 3 * 6),
    ],
    ids=str,
)
def test_needed_by_hand(rule, pairs):
    visible = rule.visible(np.arange(3)[:, None] - np.arange(-100, 3), 1000, np.arange(3)[:, None])
    assert visible.sum() == pairs
    assert (
        needed_multiply_adds(MODEL, rule, 3)
        == 2 * (4 * 2 * 4 * 3 + 2 * 4 * 3 * 3 + 3 * 2 * pairs) + 3 * 4 * 5
    )


def test_streams_share_the_weights_and_not_their_memory():
    one, eight = (step_bytes(MODEL, RULE, "ring", streams=streams) for streams in (1, 8))
    assert eight - one == 7 * 2 * 2 * 2 * 7 * 4  # layers × keys and values × A × (M + 1) × fp32


@pytest.mark.parametrize("window", [1, 7, 11])
def test_window_counts_what_the_graph_computes(window, monkeypatch):
    monkeypatch.setattr(sliding_window, "QUERIES_PER_BLOCK", 4)
    graph = WindowGraph(random_weights(MODEL), MODEL, window).build()
    assert counted(graph, {"input_ids": np.zeros((1, window), np.int64)}) == window_multiply_adds(
        MODEL, window
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("segment", [1, 3])
def test_step_counts_what_the_graph_computes(form, segment):
    graph, spec = step_model(form)
    feeds = {state.name: np.zeros((1, *state.row), np.float32) for state in spec.state}
    ids = {name: np.zeros((1, segment), np.int64) for name in ("input_ids", "position_ids")}
    assert counted(graph, {**feeds, **ids}) == step_multiply_adds(MODEL, RULE, form, segment)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_graph_and_the_visible_memory(form):
    graph, _ = step_model(form)
    constants = (onnx.numpy_helper.to_array(x) for x in ir.to_proto(graph).graph.initializer)
    weights = sum(x.nbytes for x in constants if x.dtype == np.float32 and x.size > 1)
    own = 0 if form == "hidden" else 2 * 2 * 2 * 4  # the token's own keys and values: layers × two × A × fp32
    remembered = (
        2 * 6 * 4 * (4 if form == "hidden" else 2 * 2)
    )  # layers × M × fp32 × (D, or keys and values of A)
    assert step_bytes(MODEL, RULE, form) == weights + own + remembered


def step_model(form):
    facts = ModelFacts(
        positions="relative",
        sublayers="feed-forward",
        layers=2,
        heads=1,
        head_dim=2,
        d_model=4,
        d_ff=3,
        persistent=0,
        vocab_size=5,
        cutoffs=(),
        reaches=(),
        pre_norm=False,
        parameters=count_parameters(MODEL),
    )
    spec = Spec(
        model=facts,
        rule=RULE,
        form=form,
        precision="fp32",
        opset=OPSETS[form],
        memory_identity=MemoryIdentity(layout="", weights=""),
        producer={},
        source={},
    ).completed()
    return StepGraph(spec, MODEL, random_weights(MODEL)).build(), spec


def counted(graph, feeds):
    """Multiply-adds of every MatMul and Attention in a graph, from the shapes that they meet as it runs."""
    for at, output in enumerate(
        graph.graph.outputs
    ):  # ONNX Runtime lists outputs by the name that they have in the graph
        output.name = f"output {at}"
    proto = ir.to_proto(graph)
    nodes = [node for node in proto.graph.node if node.op_type in ("MatMul", "Attention")]
    constants = {x.name: tuple(x.dims) for x in proto.graph.initializer}
    wanted = sorted({name for node in nodes for name in node.input} - set(constants))
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in wanted)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    answers = session.run(wanted, feeds)
    shapes = constants | {name: x.shape for name, x in zip(wanted, answers, strict=True)}
    total = 0
    for node in nodes:
        left, right = shapes[node.input[0]], shapes[node.input[1]]
        columns = right[-1] if node.op_type == "MatMul" else 2 * right[-2]  # attention: scores, then values
        total += math.prod(left) * columns
    return total
