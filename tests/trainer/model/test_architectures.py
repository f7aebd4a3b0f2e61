"""Every architecture in PyTorch: fast = naive with all gradients, streams cut anywhere, dropout, twenty
golden losses.

The equations are in `test_equations.py`.
"""

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
from trainer.model.config import ModelConfig, VocabularyConfig
from trainer.model.model import LanguageModel, count_parameters, parameter_shapes
from trainer.model.naive import naive_attention
from trainer.training.lane_memory import LaneMemory
from trainer.training.objective import Objective

SIZES: dict[str, Any] = {"layers": 2, "d_model": 8, "heads": 2, "head_dim": 3, "d_ff": 9, "vocab_size": 70}
GOLDEN = Path(__file__).with_name("golden_architectures.json")
CLAMPED: dict[str, dict[str, Any]] = {  # rules that no architecture has
    "masked": {"rule": MemoryRule(mem_len=3, segment=8, mask="full", clamp_len=2), "tie_biases": False},
    "zeros": {
        "rule": MemoryRule(mem_len=3, segment=8, initial_memory="zeros", clamp_len=2),
        "pre_norm": True,
    },
}
KINDS = ARCHITECTURES | CLAMPED


def build(name: str = "transformer-xl", **sizes: Any) -> tuple[LanguageModel, MemoryRule]:
    """A float64 model in evaluation mode, weights large enough that every term shows, and the rule of its
    kind.
    """
    options = KINDS[name] | sizes
    rule, _ = options.pop("rule", RULE), options.pop("shares", None)
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(**SIZES | options)).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    for span in model.spans():  # so that streams of 13 tokens meet the ramp
        span.share.data.uniform_(0.1, 0.6).mul_(16 / span.span.maximum)
    return model, rule


def feed(
    model: LanguageModel,
    tokens: torch.Tensor,
    rule: MemoryRule,
    cuts: list[int],
    attention: AttentionFunction = relative_attention,
) -> torch.Tensor:
    """Logits of a stream that is fed in segments of these lengths."""
    memory, logits, at = model.start(len(tokens), rule), [], 0
    for length in cuts:
        piece = tokens[:, at : at + length]
        answer, memory = model(piece, memory, torch.full((len(tokens),), at), rule, attention=attention)
        logits.append(answer)
        at += length
    return torch.cat(logits, dim=1)


def stream(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 70, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", KINDS)
def test_fast_model_equals_naive_in_logits_and_parameter_gradients(name: str) -> None:
    model, rule = build(name)
    results = []
    for attention in (relative_attention, naive_attention):
        logits = feed(model, stream(13, rows=1), rule, [8, 5], attention)
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
    "name", [name for name in KINDS if KINDS[name].get("rule", RULE).mask == "same-length"]
)
def test_cutting_a_stream_never_changes_its_logits(name: str) -> None:
    model, rule = build(name)
    with torch.no_grad():
        whole = feed(model, stream(40), rule, [8, 1, 7, 3, 8, 2, 8, 3])
        other = feed(model, stream(40), rule, [8] * 5)
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


def test_no_gradient_reaches_the_segment_before() -> None:
    model, rule = build()
    memory = [part.requires_grad_() for part in model.start(1, rule)]
    logits, after = model(stream(8, rows=1), memory, torch.tensor([9]), rule)
    assert not any(part.requires_grad for part in after)
    assert torch.autograd.grad(logits.sum(), memory, allow_unused=True) == (None, None)


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_rows_at_different_positions_do_not_touch_each_other(pre_norm: bool, initial_memory: str) -> None:
    """Row 0 restarts at position 0 on top of an old memory, row 1 goes on, row 2 starts with two tokens of
    padding.
    """
    model, _ = build(pre_norm=pre_norm)
    rule = MemoryRule(mem_len=5, segment=4, initial_memory=initial_memory)
    tokens = stream(12, rows=3)
    with torch.no_grad():
        memory = model.start(3, rule)
        _, memory = model(tokens[:, :4], memory, torch.tensor([0, 0, 40]), rule)
        first, memory = model(tokens[:, 4:8], memory, torch.tensor([0, 4, -2]), rule)
        second, _ = model(tokens[:, 8:], memory, torch.tensor([4, 8, 2]), rule)
        both = torch.cat([first, second], dim=1)
        fresh = feed(model, tokens[:1, 4:], rule, [4, 4])[0]
        going_on = feed(model, tokens[1:2], rule, [4, 4, 4])[0, 4:]
        padded = feed(model, tokens[2:, 6:], rule, [3, 3])[0]
    for row, alone in ((both[0], fresh), (both[1], going_on), (both[2, 2:], padded)):
        torch.testing.assert_close(row, alone, rtol=1e-10, atol=1e-10)


def test_dropout_acts_only_while_training() -> None:
    (model, rule), (plain, _) = build(dropout=0.5, attention_dropout=0.5), build()
    assert torch.equal(feed(model, stream(8), rule, [8]), feed(plain, stream(8), rule, [8]))
    model.train()
    assert not torch.equal(feed(model, stream(8), rule, [8]), feed(model, stream(8), rule, [8]))


def test_variational_dropout_shares_one_mask_along_a_segment() -> None:
    model = build(variational_dropout=True, dropout=0.5)[0].train()
    torch.manual_seed(0)
    dropped = model.output_dropout(torch.ones(3, 7, 50))
    assert all(torch.equal(dropped[:, 0], dropped[:, t]) for t in range(7))
    assert not torch.equal(dropped[0], dropped[1])
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    plain = build(dropout=0.5)[0].train().output_dropout(torch.ones(3, 7, 50))
    assert not torch.equal(plain[:, 0], plain[:, 1])


@pytest.mark.parametrize(
    "vocabulary",
    [
        {"tie_weights": False, "scale": False},
        {"cutoffs": (30, 60), "div_val": 2},
        {"cutoffs": (30, 60), "div_val": 2, "tie_projections": (True, False, False)},
    ],
)
def test_uniform_initialization_is_that_of_pytorchs_own_layers(vocabulary: dict[str, Any]) -> None:
    """Matrices and biases spread over ±1/√n of n inputs; embeddings and positions have unit variance."""
    config = ModelConfig(
        **SIZES | {"d_model": 64, "d_ff": 100, "vocab_size": 99, "heads": 3},
        positions="learned",
        context=50,
        vocabulary=VocabularyConfig(**vocabulary),
        initialization="uniform-fan-in",
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    # A projection of the output goes from D to the width of its cluster, one of the input the other way.
    inputs = {"output_projection": 64, "contract.": 100, "out.": 9, "output_bias.1": 32, "output_bias.2": 16}
    inputs |= {"projection.1": 32, "projection.2": 16}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        if name.startswith(("vocabulary.table", "positions")):
            assert 0.8 < parameter.std() < 1.2, name
            continue
        n = next((n for mark, n in inputs.items() if mark in name), 64)
        largest = parameter.abs().max().item() * n**0.5
        assert (0.05 if parameter.numel() < 10 else 0.8) < largest <= 1, name


def test_the_last_layers_output_has_a_dropout_of_its_own() -> None:
    outputs = [torch.ones(1, 40, 8)]
    assert (build(dropout=0.0, output_dropout=0.5)[0].train().last(outputs) == 0).any()
    assert not (build(dropout=0.5, output_dropout=0.0)[0].train().last(outputs) == 0).any()


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
