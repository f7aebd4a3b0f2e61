"""The training objective: likelihood of the next token, and the terms that the papers add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel
from trainer.model.vocabulary import at_least_fp32


@dataclass(frozen=True)
class Loss:
    """The loss of one segment."""

    objective: Tensor  # the scalar that training minimises, with all penalties
    nats: Tensor  # mean negative log-likelihood of a token


def segment_loss(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    memory: list[Tensor],
    positions: Tensor,
    rule: MemoryRule,
    *,
    progress: float,
    longest: Sequence[int] | None = None,
) -> tuple[Loss, list[Tensor]]:
    """The loss of one segment, and the input [B, T, D] of each layer for the memory.

    targets: int64 [B, T], the token after each. progress: share of the training that is done, 0 to 1. As it
    grows, the losses of the intermediate layers end one by one (Al-Rfou et al. 2018, section 3.2). The other
    arguments are those of `LanguageModel.inputs_and_outputs`.
    """
    config = model.config
    inputs, outputs = model.inputs_and_outputs(tokens, memory, positions, rule, longest=longest)
    first = tokens.shape[1] // 2 if config.objective.half else 0
    hidden = model.last(outputs)[:, first:]
    wanted = targets[:, first:]
    nats = -model.vocabulary.log_prob(hidden.flatten(0, 1), wanted.flatten()).mean()
    objective = nats
    for name, classifier in model.auxiliary.items():
        layer, ahead = (int(part) for part in name.split("_"))
        if layer < config.layers - 1 and progress >= (layer + 1) / (2 * config.layers):
            objective = objective + 0.0 * sum(
                parameter.sum() for parameter in classifier.parameters()
            )  # used, for DDP
            continue
        seen = outputs[layer] if layer < config.layers - 1 else model.last(outputs)
        logits = at_least_fp32(classifier(seen[:, first : tokens.shape[1] - (ahead - 1)]))
        objective = (
            objective
            + F.cross_entropy(logits.flatten(0, 1), targets[:, first + ahead - 1 :].flatten()) / ahead
        )
    for span in model.spans():
        objective = objective + span.penalty()
    return Loss(objective, nats.detach()), inputs
