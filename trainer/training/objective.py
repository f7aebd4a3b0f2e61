"""The training objective: likelihood of the next token, and the terms that the papers add to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel
from trainer.model.vocabulary import at_least_fp32


class Objective(nn.Module):
    """The model's loss as a module, because DistributedDataParallel can only wrap a module's `forward`."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: list[Tensor],
        positions: Tensor,
        rule: MemoryRule,
        *,
        progress: float,
        longest: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss of one segment with all penalties, which training minimises; the mean negative
        log-likelihood of a token in nats; and the input [B, T, D] of each layer for the memory.

        targets: int64 [B, T], the token after each. progress: share of the training that is done, 0 to 1. As
        it grows, the losses of the intermediate layers end one by one (Al-Rfou et al. 2018, section 3.2). The
        other arguments are as in `LanguageModel.inputs_and_outputs`.
        """
        model = self.model
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
                # Its parameters are used all the same, as DistributedDataParallel demands.
                objective = objective + 0.0 * sum(parameter.sum() for parameter in classifier.parameters())
                continue
            seen = outputs[layer] if layer < config.layers - 1 else model.last(outputs)
            logits = at_least_fp32(classifier(seen[:, first : tokens.shape[1] - (ahead - 1)]))
            later = targets[:, first + ahead - 1 :]
            objective = objective + F.cross_entropy(logits.flatten(0, 1), later.flatten()) / ahead
        for span in model.spans():
            objective = objective + span.penalty()
        return objective, nats.detach(), inputs
