"""What training descends: the whole or half a segment, the losses of Al-Rfou et al. (2018), and the span
penalty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, ObjectiveConfig, SpanConfig
from trainer.model.model import LanguageModel
from trainer.training.objective import Objective

SIZES: dict[str, Any] = {"layers": 4, "d_model": 8, "heads": 2, "head_dim": 4, "d_ff": 8, "vocab_size": 7}
RULE = MemoryRule(mem_len=4, segment=6)


def loss_of(model: LanguageModel, *, progress: float = 0.0) -> tuple[Tensor, float, Tensor, Tensor]:
    """The objective of one batch, its loss in nats, its inputs and its targets."""
    generator = torch.Generator().manual_seed(2)
    stream = torch.randint(0, 7, (3, 7), generator=generator)
    tokens, targets = stream[:, :-1], stream[:, 1:]
    objective, nats, _ = Objective(model)(
        tokens,
        targets,
        model.start(3, RULE),
        torch.zeros(3, dtype=torch.int64),
        RULE,
        progress=progress,
    )
    return objective, nats.item(), tokens, targets


def build(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SIZES | options)).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


def outputs_of(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    return model.layers(tokens, model.start(3, RULE), torch.zeros(3, dtype=torch.int64), RULE)[0]


def test_the_half_objective_counts_the_second_half_of_the_segment() -> None:
    model = build(objective=ObjectiveConfig(half=True))
    objective, nats, tokens, targets = loss_of(model)
    logits = model(tokens, model.start(3, RULE), torch.zeros(3, dtype=torch.int64), RULE)[0]
    expected = F.cross_entropy(logits[:, 3:].flatten(0, 1), targets[:, 3:].flatten()).item()
    assert objective.item() == nats == pytest.approx(expected)


def test_the_second_target_has_half_weight() -> None:
    model = build(objective=ObjectiveConfig(second_target=True))
    objective, nats, tokens, targets = loss_of(model, progress=1.0)  # to the end of the training
    logits = model.auxiliary["3_2"](outputs_of(model, tokens)[-1])
    second = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()).item()
    assert objective.item() == pytest.approx(nats + 0.5 * second)
    assert list(model.auxiliary) == ["3_2"]


@pytest.mark.parametrize(("progress", "layers"), [(0.124, [0, 1, 2]), (0.125, [1, 2]), (0.375, [])])
def test_intermediate_layers_predict_until_their_share_of_training_is_over(
    progress: float, layers: list[int]
) -> None:
    """Layer l of L (here l + 1 of 4) stops after l / 2L of the training."""
    model = build(objective=ObjectiveConfig(intermediate=True))
    objective, nats, tokens, targets = loss_of(model, progress=progress)
    outputs = outputs_of(model, tokens)
    extra = [
        F.cross_entropy(model.auxiliary[f"{n}_1"](outputs[n]).flatten(0, 1), targets.flatten()).item()
        for n in layers
    ]
    assert objective.item() == pytest.approx(nats + sum(extra))


def test_every_parameter_has_a_gradient_at_every_stage() -> None:
    model = build(objective=ObjectiveConfig(intermediate=True, second_target=True))
    for progress in (0.0, 0.3, 1.0):
        model.zero_grad()
        loss_of(model, progress=progress)[0].backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_span_penalty_of_every_layer_is_added() -> None:
    span = SpanConfig(maximum=4, ramp=2, penalty=0.5)
    model = build(positions="learned", context=5, span=span)
    for layer, module in enumerate(model.spans()):
        module.share.data = torch.tensor([0.25 * layer, 0.0], dtype=torch.float64)
    objective, nats, _, _ = loss_of(model)
    means = [0.5 * 0.25 * layer * 4 for layer in range(4)]  # tokens
    assert objective.item() == pytest.approx(nats + sum(0.5 * mean for mean in means))
