"""The training step under `torch.compile`, and with activations that are computed again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.run.config import TrainConfig
from trainer.training import state
from trainer.training.span_lengths import SpanLengths
from trainer.training.state import Training

LEARNED: dict[str, Any] = {"positions": "learned", "d_ff": 0, "sublayers": "all-attention", "persistent": 3}
KINDS: dict[str, dict[str, Any]] = {
    "adaptive softmax": {"vocabulary": VocabularyConfig(cutoffs=(2, 4), div_val=2)},
    "spans": LEARNED | {"context": 17, "span": SpanConfig(maximum=8)},
    "spans that grow": LEARNED | {"context": 257, "span": SpanConfig(maximum=256), "layers": 2},
    "relative": {},
    "shaw": {"positions": "shaw", "context": 9},
    "absolute": {"positions": "absolute", "context": 9},
    "per-layer": {"positions": "per-layer", "context": 9},
}
# `eager` finds what does not become one graph; the others compile the gradients too.
CASES = [
    pytest.param(backend, kind, marks=() if (backend, kind) == ("eager", "spans") else pytest.mark.slow)
    for backend, kind in itertools.product(("eager", "aot_eager", "inductor"), KINDS)
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # PyTorch uses it itself
@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_the_step_is_one_graph_and_trains_the_same(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a fresh model on, while lengths change: nothing was computed before the first compiled step."""
    sizes = {"layers": 1, "d_model": 8, "heads": 2, "head_dim": 4, "d_ff": 8, "vocab_size": 7} | KINDS[kind]
    rule = MemoryRule(mem_len=256 if kind == "spans that grow" else 8, segment=8)
    plain = TrainConfig(
        model=ModelConfig(**sizes),
        training=rule,
        evaluation=rule,
        vocab="byte",
        batch=2,
        steps=4,
        segment_schedule=((2, 4),),
    )
    if kind == "spans that grow":  # as training would let them grow over thousands of steps
        monkeypatch.setattr(SpanLengths, "current", lambda lengths: (64 * (1 + lengths.steps // 2), 64))
    compiled: list[nn.Module] = []
    compile_ = nn.Module.compile

    def traced(module: nn.Module) -> None:
        compiled.append(module)
        compile_(module, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", traced)
    monkeypatch.setattr(state, "_refuse_without_compiler", lambda device: None)
    tokens_BN = np.random.default_rng(0).integers(0, 7, (2, 200))
    tokens_BN[:, 9:] %= 3  # the last cluster of an adaptive softmax has no token from the second step on
    torch.compiler.reset()
    counters.clear()
    losses = []
    gradients = []
    for compile_it in (True, False):
        training = Training.start(dataclasses.replace(plain, compile=compile_it))
        losses.append([float(training.advance(tokens_BN).nats) for _ in range(4)])
        gradients.append({name: parameter.grad for name, parameter in training.model.named_parameters()})
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] > 1
    assert len(compiled) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


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
