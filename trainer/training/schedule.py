"""What changes during training by a rule: the learning rate, the lengths of memory and segment, and where a
pass over the text begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

from runtimes.contract.rule import MemoryRule
from trainer.run.config import Schedule, TrainConfig

FINE_TUNE_RATE = 0.1  # the share of the learning rate in the last `schedule.fine_tune_steps`


def learning_rate(config: TrainConfig, step: int, *, decays: int = 0) -> float:
    """The learning rate of a step from 0 to steps - 1. decays: plateaus so far (see `validation.decays`)."""
    schedule = config.schedule
    highest = config.optimizer.lr
    warmup = schedule.warmup_steps
    lowest = schedule.min_lr
    if step >= max(warmup, config.steps - schedule.fine_tune_steps):
        highest = FINE_TUNE_RATE * highest
        lowest = FINE_TUNE_RATE * lowest
    if step < warmup:
        return highest * (step + 1) / warmup
    if schedule.kind == "cosine":
        done = (step - warmup) / max(1, config.steps - warmup)
        return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.kind == "inverse-sqrt":  # continues the warm-up's last rate
        return max(lowest, highest * math.sqrt(max(1, warmup) / (step + 1)))
    if schedule.kind == "plateau":
        return max(lowest, highest * schedule.plateau_decay**decays)
    return highest


def training_rule(config: TrainConfig, step: int) -> MemoryRule:
    """The memory rule of a step, with the lengths that the schedules have reached."""
    rule = config.training
    M = _reached(config.mem_len_schedule, step, rule.mem_len)
    T = _reached(config.segment_schedule, step, rule.segment)
    return rule if (rule.mem_len, rule.segment) == (M, T) else dataclasses.replace(rule, mem_len=M, segment=T)


def begins_empty(config: TrainConfig, step: int) -> bool:
    """Whether all lanes begin a step with an empty memory, by the schedule."""
    every = _reached(config.empty_memory_schedule, step, 0)
    return every > 0 and step % every == 0


def first_token(config: TrainConfig, epoch: int, *, length: int, segment: int) -> int:
    """The index in the lanes at which a pass over the text begins.

    epoch: 0 for the first pass, which begins at 0. length: tokens of a lane. segment: tokens of the next
    step. A later pass begins at one of the first `segment` tokens, so the segments are cut elsewhere than
    before, and a whole segment with its targets still fits. The number follows from the run's seed and the
    epoch alone: a resumed run and every process have the same one, and dropout's random state is not touched.
    """
    if epoch == 0:
        return 0
    digest = hashlib.sha256(f"{config.seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % min(segment, length - segment)


def _reached(schedule: Schedule, step: int, value: int) -> int:
    for start, changed in schedule:
        if start <= step:
            value = changed
    return value
