"""Scores of the held-out text, and what training decides from their history.

A validation runs in the process that trains, with training's number of lanes and the rule of evaluation.
Every process scores its share of the lanes. The decisions are: which weights are the best, when the learning
rate decays, when averaging begins, when training ends. Only the history is stored. Every decision is computed
from it, so a resumed run decides as the first one did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel
from trainer.run.config import Averaging, TrainConfig
from trainer.run.history import Validation, best
from trainer.training.parallel import ALONE, Ranks
from trainer.training.shard import gathered


def validate(
    model: LanguageModel,
    config: TrainConfig,
    tokens: np.ndarray,
    ranks: Ranks = ALONE,
    *,
    lanes: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> float:
    """The bits per token of held-out tokens [N], the same number on every process. Collective.

    It is the score of `runtimes.tasks.evaluate.evaluate` with `lanes` lanes (`config.batch` when None), or
    fewer if the text is short, over the first `limit` predictions (all when None). It is NaN or infinite if
    the model is broken.
    progress: called after every step with the number of tokens that this process has predicted.
    """
    targets = min(len(tokens) - 1, limit or len(tokens))
    inputs_BN, targets_BN = _own_lanes(np.asarray(tokens[: targets + 1]), lanes or config.batch, ranks)
    was_training = model.training
    model.eval()
    done = 0
    nats = torch.zeros(1, dtype=torch.float64)
    with gathered(model):
        rule = _shortened(config.validation, model)
        # A group has no more lanes than one part of a training step, so it fits where training fits.
        for rows in np.array_split(np.arange(len(inputs_BN)), min(config.accumulate, len(inputs_BN))):
            inputs, wanted = (
                torch.from_numpy(array[rows]).to(ranks.device) for array in (inputs_BN, targets_BN)
            )
            nats += _group_nats(model, rule, inputs, wanted, done, progress)
            done += inputs.numel()
    model.train(was_training)
    # The parts are added in the order of the processes, so all of them have the same bits.
    return float(ranks.gather(nats).sum()) / targets / math.log(2)


def _own_lanes(tokens: np.ndarray, batch: int, ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, int64 [B, N], of the lanes of this process, cut as `evaluate` cuts them.

    A target of -1 is padding. All processes have arrays of one shape, so that all take the same steps: a
    process without a lane of its own has rows of padding.
    """
    targets = len(tokens) - 1
    count = min(batch, targets)
    starts = [targets * lane // count for lane in range(count + 1)]
    own = -(-count // ranks.count)
    inputs_BN = np.zeros((own, -(-targets // count)), np.int64)
    targets_BN = np.full_like(inputs_BN, -1)
    for row, lane in enumerate(range(ranks.rank * own, min((ranks.rank + 1) * own, count))):
        first = starts[lane]
        last = starts[lane + 1]
        inputs_BN[row, : last - first] = tokens[first:last]
        targets_BN[row, : last - first] = tokens[first + 1 : last + 1]
    return inputs_BN, targets_BN


def _shortened(rule: MemoryRule, model: LanguageModel) -> MemoryRule:
    """The rule without memory that no adaptive span gives weight to: its scores are the same."""
    shares = [span.share for span in model.spans()]
    if not shares or not all(bool(share.isfinite().all()) for share in shares):
        return rule
    longest = max(distance for heads in model.longest_distances() for distance in heads)
    return dataclasses.replace(rule, mem_len=min(rule.mem_len, longest))


def _group_nats(
    model: LanguageModel,
    rule: MemoryRule,
    inputs_BN: Tensor,
    targets_BN: Tensor,
    done: int,
    progress: Callable[[int], None],
) -> Tensor:
    """The sum [1], float64 on the CPU, of the losses of all targets but -1. done: tokens before these."""
    projected = ProjectedModel(model, rule, around=gathered)
    B, N = inputs_BN.shape
    memory = projected.start(B)
    sums = []
    for at in range(0, N, rule.segment):
        piece = slice(at, at + rule.segment)
        positions = torch.full((B,), at, device=inputs_BN.device)
        hidden, memory = projected.step(inputs_BN[:, piece], memory, positions)
        wanted = targets_BN[:, piece].flatten()
        with torch.inference_mode():
            log_probs = model.vocabulary.log_prob(hidden.flatten(0, 1), wanted.clamp(min=0))
            # Stays on the device: to read it here would make every step wait.
            sums.append(-torch.where(wanted >= 0, log_probs, 0.0).sum())
        progress(done + min(piece.stop, N) * B)
    return torch.stack(sums).cpu().double().sum()[None]


def out_of_patience(history: Sequence[Validation], patience: int) -> bool:
    """Whether the last `patience` validations brought no better score. A patience of 0 never ends."""
    leader = best(history)
    return leader is not None and 0 < patience <= len(history) - 1 - history.index(leader)


def decays(history: Sequence[Validation], patience: int) -> int:
    """How often the learning rate has decayed.

    It decays when more than `patience` validations in a row were no better than the best; then the count
    starts again.
    """
    count = 0
    waited = 0
    lowest = float("inf")
    for validation in history:
        waited = 0 if validation.bits_per_token < lowest else waited + 1
        lowest = min(lowest, validation.bits_per_token)
        if waited > patience:
            count += 1
            waited = 0
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
