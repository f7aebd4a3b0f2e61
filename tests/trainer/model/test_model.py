"""The model: fast against naive, streams cut anywhere, memory, stop-gradient.

The equations are in `test_equations.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from tests.nightly import matrix
from trainer.model.attention import AttentionFunction, relative_attention
from trainer.model.config import ModelConfig, VocabularyConfig
from trainer.model.model import LanguageModel, drop
from trainer.model.naive import naive_attention

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
SIZES = {"layers": 2, "d_model": 6, "heads": 3, "head_dim": 3, "d_ff": 7, "vocab_size": 11}


def build(**sizes: Any) -> LanguageModel:
    """A float64 model in evaluation mode, weights large enough that every term shows."""
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(**SIZES | sizes)).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return model


def stream(B: int, N: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (B, N), generator=torch.Generator().manual_seed(2))


def feed(
    model: LanguageModel,
    tokens: Tensor,
    rule: MemoryRule,
    cuts: list[int],
    attention: AttentionFunction = relative_attention,
) -> tuple[Tensor, list[Tensor]]:
    """Logits and last memory of a stream fed in segments of the given lengths."""
    memory, logits, at = model.start(len(tokens), rule), [], 0
    for length in cuts:
        piece = tokens[:, at : at + length]
        answer, memory = model(piece, memory, torch.full((len(tokens),), at), rule, attention=attention)
        logits.append(answer)
        at += length
    assert at == tokens.shape[1]
    return torch.cat(logits, dim=1), memory


@pytest.mark.parametrize(
    ("pre_norm", "tie_biases", "mask", "initial_memory", "clamp_len"),
    matrix((False, True), (False, True), ("same-length", "full"), ("masked", "zeros"), (None, 2)),
)
def test_fast_model_equals_naive_in_logits_memory_and_parameter_gradients(
    pre_norm: bool, tie_biases: bool, mask: str, initial_memory: str, clamp_len: int | None
) -> None:
    model = build(pre_norm=pre_norm, tie_biases=tie_biases)
    rule = MemoryRule(mem_len=3, segment=4, mask=mask, initial_memory=initial_memory, clamp_len=clamp_len)
    tokens = stream(2, 7)
    results = []
    for attention in (relative_attention, naive_attention):
        logits, memory = feed(model, tokens, rule, [4, 3], attention)
        model.zero_grad()
        logits.log_softmax(-1)[..., 0].sum().backward()
        results.append(
            (logits, memory, {name: parameter.grad for name, parameter in model.named_parameters()})
        )
    (logits, memory, gradients), (true_logits, true_memory, true_gradients) = results
    torch.testing.assert_close(logits, true_logits, **TIGHT)
    torch.testing.assert_close(memory, true_memory, **TIGHT)
    torch.testing.assert_close(gradients, true_gradients, rtol=1e-9, atol=1e-9)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())


def test_no_gradient_reaches_the_segment_before() -> None:
    model, rule = build(), MemoryRule(mem_len=4, segment=4)
    memory = [part.requires_grad_() for part in model.start(1, rule)]
    positions = torch.tensor([9])
    logits, after = model(stream(1, 4), memory, positions, rule)
    assert not any(part.requires_grad for part in after)
    assert torch.autograd.grad(logits.sum(), memory, allow_unused=True) == (None, None)


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_rows_at_different_positions_do_not_touch_each_other(pre_norm: bool, initial_memory: str) -> None:
    """Row 0 restarts at position 0 on top of an old memory, row 1 goes on, row 2 starts with two tokens of
    padding.
    """
    model, rule = build(pre_norm=pre_norm), MemoryRule(mem_len=5, segment=4, initial_memory=initial_memory)
    tokens = stream(3, 12)
    with torch.no_grad():
        memory = model.start(3, rule)
        _, memory = model(tokens[:, :4], memory, torch.tensor([0, 0, 40]), rule)
        first, memory = model(tokens[:, 4:8], memory, torch.tensor([0, 4, -2]), rule)
        second, _ = model(tokens[:, 8:], memory, torch.tensor([4, 8, 2]), rule)
        both = torch.cat([first, second], dim=1)
        fresh = feed(model, tokens[:1, 4:], rule, [4, 4])[0][0]
        going_on = feed(model, tokens[1:2], rule, [4, 4, 4])[0][0, 4:]
        padded = feed(model, tokens[2:, 6:], rule, [3, 3])[0][0]
    torch.testing.assert_close(both[0], fresh, **TIGHT)
    torch.testing.assert_close(both[1], going_on, **TIGHT)
    torch.testing.assert_close(both[2, 2:], padded, **TIGHT)


@pytest.mark.parametrize("cuts", [[6], [5, 1]])
def test_memory_is_the_last_inputs_of_each_layer(cuts: list[int]) -> None:
    model, rule, tokens = build(), MemoryRule(mem_len=4, segment=6), stream(2, 6)
    inputs: list[list[Tensor]] = [[], []]
    for block, seen in zip(model.blocks, inputs, strict=True):
        block.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
    with torch.no_grad():
        _, memory = feed(model, tokens, rule, cuts)
    for layer, seen in zip(memory, inputs, strict=True):
        assert torch.equal(layer, torch.cat(seen, dim=1)[:, -4:])
    torch.testing.assert_close(memory[0], model.vocabulary.embed(tokens[:, -4:]))


def test_dropout_acts_only_while_training() -> None:
    model, rule, tokens = (
        build(dropout=0.5, attention_dropout=0.5),
        MemoryRule(mem_len=2, segment=4),
        stream(1, 4),
    )
    start, zero = model.start(1, rule), torch.zeros(1, dtype=torch.int64)
    assert torch.equal(model(tokens, start, zero, rule)[0], build()(tokens, start, zero, rule)[0])
    model.train()
    assert not torch.equal(model(tokens, start, zero, rule)[0], model(tokens, start, zero, rule)[0])


def test_variational_dropout_shares_one_mask_along_a_segment() -> None:
    model = build(variational_dropout=True, dropout=0.5).train()
    torch.manual_seed(0)
    dropped = drop(torch.ones(3, 7, 50), 0.5, model)
    assert all(torch.equal(dropped[:, 0], dropped[:, t]) for t in range(7))
    assert not torch.equal(dropped[0], dropped[1])
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    plain = drop(torch.ones(3, 7, 50), 0.5, build(dropout=0.5).train())
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
        **SIZES | {"d_model": 64, "d_ff": 100, "vocab_size": 99},
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
    model = build(dropout=0.0, output_dropout=0.5).train()
    assert (model.last([torch.ones(1, 40, 6)]) == 0).any()
    assert not (build(dropout=0.5, output_dropout=0.0).train().last([torch.ones(1, 40, 6)]) == 0).any()
