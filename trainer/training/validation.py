"""Held-out scores, and what follows from their history: the best, learning-rate decays, the average's start, the end.

The history is all that is remembered; everything else is computed from it, so a resumed run decides as the first one did.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.evaluate import Score, evaluate
from trainer.run.config import Averaging, TrainConfig
from trainer.run.session import TorchSession

LANES = 8


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The score of the held-out text after `step` steps."""

    step: int
    bits_per_token: float


def validate(model: nn.Module, config: TrainConfig, vocab: Vocab, tokens: np.ndarray) -> Score:
    """The score of held-out tokens by the very `evaluate` that scores artefacts; it runs on the CPU."""
    was_training = model.training
    session = TorchSession(_on_cpu(model).eval(), vocab, config.evaluation, identity="training")  # type: ignore[arg-type]
    score = evaluate(session, tokens, lanes=min(LANES, len(tokens) - 1))
    model.train(was_training)
    return score


def best(history: Sequence[Validation]) -> Validation | None:
    """The validation with the lowest score, the first of several; None before the first."""
    return min(history, key=lambda validation: validation.bits_per_token, default=None)


def out_of_patience(history: Sequence[Validation], patience: int) -> bool:
    """Whether the last `patience` validations were no better than the best before them; never where it is 0."""
    leader = best(history)
    return leader is not None and 0 < patience <= len(history) - 1 - history.index(leader)


def decays(history: Sequence[Validation], patience: int) -> int:
    """How often more than `patience` validations in a row were no better than the best, counting anew after each."""
    count, waited, lowest = 0, 0, float("inf")
    for validation in history:
        waited = 0 if validation.bits_per_token < lowest else waited + 1
        lowest = min(lowest, validation.bits_per_token)
        if waited > patience:
            count, waited = count + 1, 0
    return count


def average_start(averaging: Averaging, history: Sequence[Validation]) -> int | None:
    """The step after which weights are averaged; None where that is not known yet."""
    if averaging.patience is None:
        return averaging.start_step
    scores = [validation.bits_per_token for validation in history]
    for now in range(averaging.patience + 1, len(scores)):
        if scores[now] > min(scores[: now - averaging.patience]):
            return history[now].step
    return None


def _on_cpu(model: nn.Module) -> nn.Module:
    on_cpu = next(model.parameters()).device.type == "cpu"
    return model if on_cpu else copy.deepcopy(model).cpu()
