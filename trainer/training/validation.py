"""Scores of the held-out text, and what training decides from their history.

The decisions are: which weights are the best, when the learning rate decays, when averaging begins, when
training ends. Only the history is stored. Every decision is computed from it, so a resumed run decides as the
first one did.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torch import nn

from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.evaluate import Score, evaluate
from trainer.run.config import Averaging, TrainConfig
from trainer.run.history import Validation, best
from trainer.run.session import TorchSession

LANES = 8  # rows of the held-out text that are scored side by side


def validate(model: nn.Module, config: TrainConfig, vocab: Vocab, tokens: np.ndarray) -> Score:
    """The score of held-out tokens, by the same `evaluate` that scores artefacts. It runs on the CPU."""
    was_training = model.training
    session = TorchSession(_on_cpu(model).eval(), vocab, config.evaluation, identity="training")  # type: ignore[arg-type]
    score = evaluate(session, tokens, lanes=min(LANES, len(tokens) - 1))
    model.train(was_training)
    return score


def out_of_patience(history: Sequence[Validation], patience: int) -> bool:
    """Whether the last `patience` validations brought no better score. A patience of 0 never ends."""
    leader = best(history)
    return leader is not None and 0 < patience <= len(history) - 1 - history.index(leader)


def decays(history: Sequence[Validation], patience: int) -> int:
    """How often the learning rate has decayed.

    It decays when more than `patience` validations in a row were no better than the best; then the count
    starts again.
    """
    count, waited, lowest = 0, 0, float("inf")
    for validation in history:
        waited = 0 if validation.bits_per_token < lowest else waited + 1
        lowest = min(lowest, validation.bits_per_token)
        if waited > patience:
            count, waited = count + 1, 0
    return count


def average_start(averaging: Averaging, history: Sequence[Validation]) -> int | None:
    """The step after which weights are averaged, or None while that is not known."""
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
