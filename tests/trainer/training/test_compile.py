"""The training step under `torch.compile`, and with activations that are computed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.training import state
from trainer.training.objective import Objective
from trainer.training.span_lengths import SpanLengths
from trainer.training.state import Training

SIZES: dict[str, Any] = {"layers": 2, "d_model": 8, "heads": 2, "head_dim": 4, "vocab_size": 7}
PLAIN = {"d_ff": 8}
KINDS: dict[str, dict[str, Any]] = {
    "relative": PLAIN,
    "adaptive softmax": PLAIN | {"vocabulary": VocabularyConfig(cutoffs=(2, 4), div_val=2)},
    "shaw": PLAIN | {"context": 9},
    "learned": {"context": 17, "sublayers": "all-attention", "persistent": 3, "span": SpanConfig(maximum=8)},
    "absolute": PLAIN | {"context": 9},
    "per-layer": PLAIN | {"context": 9},
}
RULE = MemoryRule(mem_len=8, segment=8)


def results(objective: Any, model: LanguageModel) -> list[Tensor]:
    """The loss and the gradients of two segments."""
    tokens = torch.randint(0, 7, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens[:, 9:] %= 3  # the second segment has no token of the last cluster of an adaptive softmax
    memory, answers = model.start(2, RULE), []
    model.zero_grad()
    for at in (0, 8):
        loss, _, memory = objective(
            tokens[:, at : at + 8],
            tokens[:, at + 1 : at + 9],
            memory,
            torch.full((1,), at),
            RULE,
            progress=at / 16,
        )
        loss.backward()
        answers.append(loss.detach())
    return answers + [p.grad for p in model.parameters() if p.grad is not None]


def objective_of(kind: str) -> Objective:
    torch.manual_seed(0)
    positions = "relative" if kind == "adaptive softmax" else kind
    model = LanguageModel(ModelConfig(**SIZES, positions=positions, **KINDS[kind]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.constrain()
    return Objective(model.train())


# `eager` finds what does not become one graph; `aot_eager` traces the gradients too, for twice the time.
# Those that compile within seconds, and differ from the plain model of the test below, are not slow.
CHOSEN = [("eager", kind) for kind in ("adaptive softmax", "learned", "per-layer")]
BACKENDS = [
    pytest.param(backend, kind, marks=() if (backend, kind) in CHOSEN else pytest.mark.slow)
    for backend in ("eager", "aot_eager", "inductor")
    for kind in KINDS
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # PyTorch uses it itself
@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
def test_the_step_is_one_graph_and_computes_the_same(backend: str, kind: str) -> None:
    objective = objective_of(kind)
    plain = results(objective, objective.model)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # as `Training` sets it
        compiled = results(torch.compile(objective, backend=backend, fullgraph=True), objective.model)
    for ours, true in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "relative" else pytest.mark.slow) for k in KINDS]
)
def test_training_compiles_graphs_without_breaks_while_lengths_change(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a fresh model on: nothing was computed before the first compiled step."""
    sizes: dict[str, Any] = (
        SIZES | {"positions": "relative" if kind == "adaptive softmax" else kind} | KINDS[kind]
    )
    far = {"context": 257, "span": SpanConfig(maximum=256)} if kind == "learned" else {}
    few = {} if far else {"layers": 1}
    rule = MemoryRule(mem_len=256 if far else 8, segment=8)
    plain = TrainConfig(
        model=ModelConfig(**(sizes | far | few)),
        training=rule,
        evaluation=rule,
        vocab="byte",
        batch=2,
        steps=4,
        segment_schedule=((2, 4),),
    )
    if far:  # spans that grow, as training would let them grow over thousands of steps
        monkeypatch.setattr(SpanLengths, "current", lambda lengths: (64 * (1 + lengths.steps // 2), 64))
    compiled: list[nn.Module] = []
    compile_ = nn.Module.compile

    def traced(module: nn.Module) -> None:
        compiled.append(module)
        compile_(module, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", traced)
    monkeypatch.setattr(state, "_refuse_without_compiler", lambda device: None)
    tokens_BN = np.random.default_rng(0).integers(0, 7, (2, 200))
    torch.compiler.reset()
    counters.clear()
    losses = []
    for compile_it in (True, False):
        training = Training.start(dataclasses.replace(plain, compile=compile_it))
        losses.append([float(training.advance(tokens_BN).nats) for _ in range(4)])
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] > 1
    assert len(compiled) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_activations_that_are_computed_again_give_the_same_bits(
    make_config: Callable[..., TrainConfig], started: Callable[[TrainConfig], tuple[Training, np.ndarray]]
) -> None:
    config = make_config(dropout=0.3, attention_dropout=0.2)
    kept, tokens_BN = started(config)
    again, _ = started(dataclasses.replace(config, checkpoint_activations=True))
    calls: list[int] = []
    again.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for training in (kept, again):
        torch.manual_seed(3)
        for _ in range(3):
            training.advance(tokens_BN)
    assert len(calls) == 6, "each forward pass of the block was computed twice"
    for (name, mine), theirs in zip(again.model.named_parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    large = dataclasses.replace(config, batch=64)
    assert dataclasses.replace(large, checkpoint_activations=True).num_bytes(64) < large.num_bytes(64)


def test_a_machine_without_a_compiler_is_told_so(
    make_config: Callable[..., TrainConfig],
    started: Callable[[TrainConfig], tuple[Training, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"compile is true, and torch\.compile needs a C\+\+ compiler"):
        started(make_config(compile=True))
