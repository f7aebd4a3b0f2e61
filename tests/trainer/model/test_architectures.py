"""Every architecture in PyTorch: fast = naive with all gradients, streams cut anywhere, twenty golden
losses."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from runtimes.contract.rule import MemoryRule
from tests.architectures import ARCHITECTURES, RULE
from tests.nightly import every
from trainer.model.attention import AttentionFunction, relative_attention
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel, count_parameters, parameter_shapes
from trainer.model.naive import naive_attention
from trainer.training.lane_memory import LaneMemory
from trainer.training.objective import Objective

SIZES: dict[str, Any] = {"layers": 2, "d_model": 8, "heads": 2, "head_dim": 3, "d_ff": 9, "vocab_size": 70}
GOLDEN = Path(__file__).with_name("golden_architectures.json")


def build(name: str) -> tuple[LanguageModel, MemoryRule]:
    """A float64 model in evaluation mode, weights large enough that every term shows, and the rule of its
    kind.
    """
    options = dict(ARCHITECTURES[name])
    rule, _ = options.pop("rule", RULE), options.pop("shares", None)
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(**SIZES | options)).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    for span in model.spans():
        span.share.data.uniform_(0.1, 0.6).mul_(
            16 / span.span.maximum
        )  # so that streams of 19 tokens meet the ramp
    return model, rule


def feed(
    model: LanguageModel,
    tokens: torch.Tensor,
    rule: MemoryRule,
    cuts: list[int],
    attention: AttentionFunction,
) -> torch.Tensor:
    memory, logits, at = model.start(len(tokens), rule), [], 0
    for length in cuts:
        piece = tokens[:, at : at + length]
        answer, memory = model(piece, memory, torch.full((len(tokens),), at), rule, attention=attention)
        logits.append(answer)
        at += length
    return torch.cat(logits, dim=1)


def stream(length: int) -> torch.Tensor:
    return torch.randint(0, 70, (2, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fast_model_equals_naive_in_logits_and_parameter_gradients(name: str) -> None:
    model, rule = build(name)
    results = []
    for attention in (relative_attention, naive_attention):
        logits = feed(model, stream(19)[:1], rule, [8, 3, 8], attention)
        model.zero_grad()
        logits.log_softmax(-1)[..., 0].sum().backward()  # type: ignore[no-untyped-call]
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits, gradients))
    (logits, gradients), (true_logits, true_gradients) = results
    torch.testing.assert_close(logits, true_logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients, true_gradients, rtol=1e-8, atol=1e-8)
    silent = {n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0}
    assert not silent, silent


@pytest.mark.parametrize(
    "name", [name for name in ARCHITECTURES if ARCHITECTURES[name].get("rule", RULE).mask == "same-length"]
)
def test_cutting_a_stream_never_changes_its_logits(name: str) -> None:
    model, rule = build(name)
    with torch.no_grad():
        whole = feed(model, stream(40), rule, [8, 1, 7, 3, 8, 2, 8, 3], relative_attention)
        other = feed(model, stream(40), rule, [8] * 5, relative_attention)
    torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_counted_without_building_the_model(name: str) -> None:
    model, _ = build(name)
    shapes = parameter_shapes(model.config)
    assert shapes == {n: p.shape for n, p in model.named_parameters()}
    assert count_parameters(model.config) == sum(p.numel() for p in model.parameters())


def test_a_model_of_shapes_alone_draws_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing would load PyTorch's compiler, which takes seconds of every command that opens a run."""
    monkeypatch.setattr(LanguageModel, "reset_parameters", lambda _: pytest.fail("values are drawn"))
    assert count_parameters(ModelConfig(**SIZES, pre_norm=True, dropout=0.017)) > 0  # not in the cache yet
    with torch.device("meta"):
        LanguageModel(ModelConfig(**SIZES))


def losses_of(name: str) -> list[float]:
    """Twenty steps of training a small float32 model of this kind on a stream that repeats itself."""
    options = dict(ARCHITECTURES[name])
    rule, _ = dataclasses.replace(options.pop("rule", RULE), mask="full"), options.pop("shares", None)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SIZES | options)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = torch.arange(4 * 200).view(4, 200) * 7 % 70
    memory, losses = LaneMemory(model.start(4, rule)), []
    for step in range(20):
        piece, at = text[:, step * 8 : step * 8 + 9], torch.full((4,), step * 8)
        tokens, targets = piece[:, :-1], piece[:, 1:]
        loss, nats, inputs = Objective(model)(tokens, targets, memory.whole(), at, rule, progress=step / 20)
        memory.add(inputs, rule.mem_len)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.constrain()
        losses.append(round(nats.item(), 6))
    return losses


@pytest.mark.parametrize("name", every(2, ARCHITECTURES))
def test_golden_losses_of_twenty_steps(name: str) -> None:
    """A refactoring leaves every loss as it was.

    After a change that is meant to alter them, write them anew with

    REGENERATE=1 .venv/bin/python -m pytest tests/trainer/model/test_architectures.py -k golden
    """
    losses = losses_of(name)
    if os.environ.get("REGENERATE"):
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps(known | {name: losses}, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[name], abs=1e-4)
    assert losses[-1] < losses[0] - 0.2, "nothing was learned"
