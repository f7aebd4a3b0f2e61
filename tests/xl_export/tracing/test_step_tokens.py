"""A module whose step takes one token gets a graph of several, in which only what has to wait is repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from runtimes import check, open_session
from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, T
from xl_export import trace
from xl_export.tracing.module import ModuleStep, features


@pytest.mark.parametrize(("name", "heads"), [("lstm", 1), ("large lstm", 2)])
def test_only_the_recurrence_is_repeated(
    name: str, heads: int, module_artefact: Callable[[str], Path]
) -> None:
    artefact = module_artefact(name)
    spec = load_spec(artefact)
    assert (spec.fixed_rows, spec.token_graphs) == (None, {T: GRAPH, 1: "step.1.onnx"})
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    # Of the token, of the state, and of each output layer: logits, and log-probabilities of targets.
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 1 + T + heads
    assert check(artefact).passed


def test_pieces_of_any_length_have_the_answers_of_single_tokens(
    module_artefact: Callable[[str], Path],
) -> None:
    session = open_session(module_artefact("lstm"))
    module = modules.Lstm().eval()
    tokens = np.random.default_rng(0).integers(0, modules.VOCAB.size, (3, 5 * T))
    first = np.array([0, -2, -T - 1])  # rows start in the middle of a piece, at its end, and with the next
    memory = session.start(3)
    memory.positions[:] = first
    found = []
    for at in range(0, 5 * T, T):
        for part in (slice(at, at + T),) if at % (2 * T) else (slice(at, at + 1), slice(at + 1, at + T)):
            found.append(session.step(tokens[:, part], memory)[0])
    expected, state = [], module.start(3)
    with torch.no_grad():
        for n in range(5 * T):
            token, at = torch.from_numpy(tokens[:, n : n + 1]), torch.from_numpy(first[:, None] + n)
            logits, state = module.step(token, at, state)
            expected.append(logits.numpy())
    fed = first[:, None] + np.arange(5 * T) >= 0
    difference = np.concatenate(found, 1) - np.concatenate(expected, 1)
    assert np.abs(difference[fed]).max() < 1e-5


def test_a_stream_goes_on_after_the_pieces_before_one_that_fails(
    module_artefact: Callable[[str], Path],
) -> None:
    session = open_session(module_artefact("lstm"))
    tokens = np.random.default_rng(0).integers(0, modules.VOCAB.size, (2, T + 2))
    memory, other = session.start(2), session.start(2)
    for each in (memory, other):
        session.step(tokens[:, T:], each)
    right, _ = session.step(tokens[:, 2:], other)
    session.before_run = iter([None]).__next__  # the second piece raises an error
    with pytest.raises(StopIteration):
        session.step(tokens[:, 2 : T + 1], memory)
    session.before_run = None
    done = memory.positions[0] - 2
    assert 0 < done < T - 1
    found, _ = session.step(tokens[:, 2 + done :], memory)
    assert np.abs(found - right[:, done:]).max() < 1e-5


class Odd(nn.Module):
    """What is hard to take apart: a memory that is the last input, one that no token changes back, rows that
    are folded into another axis, an input without tokens, outputs without tokens, of which one is as wide as
    a step has tokens, and a constant output.
    """

    step_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = {"x": features(6), "goal": modules.constant(4)}
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(4, 4)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, 6), torch.ones(batch, 2, 3), torch.zeros(batch, 2, 3)]

    def step(self, inputs: Any, positions: Tensor, memory: Any) -> Any:
        last, slow, state = memory
        batch, ys = positions.shape[0], []
        for place in range(positions.shape[1]):
            x = self.mix(inputs["x"][:, place] + last).view(batch * 2, 3)
            last = inputs["x"][:, place]
            state = (0.5 * state.view(batch * 2, 3) + x.tanh()).view(batch, 2, 3)
            slow = slow * (1 + 0.1 * state.sigmoid())
            slow = slow / slow.amax((1, 2), keepdim=True)
            ys.append(torch.cat([state.flatten(1), slow.tanh().flatten(1)], 1))
        y = torch.stack(ys, 1)
        size = torch.ones(batch, 1) * self.out(inputs["goal"]).sum(1, keepdim=True)
        outputs = {"y": y, "last": state.flatten(1), "size": size + slow.sum((1, 2))[:, None]}
        outputs |= {"pair": state[:, :, 0], "same": torch.ones(batch, len(ys), 3) + torch.zeros(1, 1, 3)}
        return outputs, [last, slow, state]


@pytest.mark.parametrize("rows", [None, 2])
def test_what_is_hard_to_take_apart_is_right(rows: int | None, tmp_path: Path) -> None:
    rule = MemoryRule(mem_len=8, segment=8)
    artefact = trace(Odd(), tmp_path / "a", rule=rule, rows=rows, tokens=(1, 2, 8), without={"padding"})
    assert check(artefact).passed
    session, step = open_session(artefact), ModuleStep(Odd().eval())
    draw = torch.Generator().manual_seed(0)
    x, goal = torch.randn(2, 24, 6, generator=draw), torch.randn(2, 4, generator=draw)
    memory = session.start(2)
    found = [
        session.step({"x": x[:, at : at + 8].numpy(), "goal": goal.numpy()}, memory)[0] for at in (0, 8, 16)
    ]
    with torch.no_grad():
        right, _ = step({"x": x, "goal": goal}, torch.arange(24).expand(2, -1), step.start(2))
    for name in ("y", "same"):
        assert np.abs(np.concatenate([y[name] for y in found], 1) - right[name].numpy()).max() < 1e-5
    for name in ("last", "size", "pair"):
        assert np.abs(found[-1][name] - right[name].numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("step_tokens", "message"),
    [
        (0, "step_tokens is 0; expected a whole number from 1"),
        (3, "step_tokens=3, of which 4 is no multiple"),
    ],
)
def test_numbers_of_tokens_that_make_no_whole_segment_are_refused(
    step_tokens: int, message: str, tmp_path: Path
) -> None:
    module = modules.Lstm()
    module.step_tokens = step_tokens
    with pytest.raises(UserError, match=message):
        trace(module, tmp_path / "a", vocab=modules.VOCAB, rule=RULE)
