"""How far the training of a run has come: its steps and validations, from the metadata of its checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, UserError, first_line
from runtimes.base.files import read_json
from runtimes.base.records import from_json, to_json
from trainer.run.checkpoint import CONFIG, STATE, load_metadata
from trainer.run.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The score of the held-out text after `step` steps."""

    step: int
    bits_per_token: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The part of a checkpoint that is no tensor."""

    text: str  # hashes of the training text and of the held-out text
    step: int
    at: int  # index in the lanes where the next segment begins
    position: int  # stream position of that segment
    averaged: int  # number of weights in the average
    scale: float  # scale of the fp16 loss
    scale_steps: int  # steps since the scale changed
    ranks: int  # number of processes whose random states are stored
    validations: tuple[Validation, ...]
    epoch: int  # how often the streams have started again
    # The number of lanes of every validation of the run, and its most tokens; None for all. They stay as
    # they were when the run began, because its scores are compared.
    lanes: int
    limit: int | None
    final: float | None  # bits per token of the whole held-out text at the end of training; None before
    held_out: str | None  # the SHA-256 of the held-out text, as `Source` has it


def best(history: Sequence[Validation]) -> Validation | None:
    """The first validation with the lowest score, or None if there is no validation."""
    return min(history, key=lambda validation: validation.bits_per_token, default=None)


@dataclass(frozen=True, kw_only=True)
class History:
    """The training of a run."""

    config: TrainConfig
    facts: Facts | None  # of its last checkpoint; None where its file is damaged

    def describe(self) -> dict[str, Any]:
        """What `info` says of the training, as JSON; step is None where the checkpoint is damaged."""
        config = self.config
        leader = best(self.facts.validations if self.facts else ())
        return {
            "step": self.facts.step if self.facts else None,
            "steps": config.steps,
            "best": None if leader is None else to_json(leader),
            "final_validation_bits_per_token": self.facts.final if self.facts else None,
            "data": config.data or config.text or "the built-in text",
            "recipe": {
                "optimizer": config.optimizer.kind,
                "learning_rate": config.optimizer.lr,
                "schedule": config.schedule.kind,
                "warmup_steps": config.schedule.warmup_steps,
                "batch": config.batch,
                "autocast": config.autocast,
                "seed": config.seed,
            },
            "rule": to_json(config.training),
        }

    @property
    def concern(self) -> str | None:
        """One sentence on why the run may be of no use, or None.

        A model that has learned anything scores better than one that gives every token the same probability,
        which costs log2(vocab_size) bits per token.
        """
        if self.facts is None:
            return (
                f"how this run was trained is unknown, because its {STATE} is missing or damaged; copy the "
                "run again."
            )
        leader = best(self.facts.validations)
        vocab_size = self.config.model.vocab_size
        if leader is None:
            if self.facts.step < self.config.steps:
                mend = "continue it with `xl-export train --resume RUN`, or validate sooner (validate_every)"
            elif self.config.data is not None:
                mend = "train on a dataset whose valid part is long enough"
            else:
                mend = "train on a longer text, of which 5 % is held out for validation"
            return f"this run was never validated, so nobody knows how good its weights are; {mend}."
        uniform = math.log2(vocab_size)
        if leader.bits_per_token <= uniform or vocab_size == 1:
            return None
        return (
            f"the best validation of this run is {leader.bits_per_token:.4g} bits/token, worse than the "
            f"{uniform:.4g} of a model that gives every token the same probability; train longer, or with a "
            "lower optimizer.lr."
        )


def history_of(run: Path) -> History | None:
    """The training of a run; None for a run that was imported, and so has no checkpoint to resume from."""
    if not (run / STATE).is_file():
        return None
    config = TrainConfig.from_json(read_json(run / CONFIG), where=str(run / CONFIG))
    try:
        return History(config=config, facts=read_facts(run / STATE, config.steps))
    except UserError:  # neither an export nor `info` needs that file
        return History(config=config, facts=None)


def concern_about(run: Path) -> str | None:
    """One sentence on why a run may be of no use (see `History`), or None; None for an imported run, too."""
    history = history_of(run)
    return history.concern if history else None


def read_facts(path: Path, steps: int) -> Facts:
    metadata = load_metadata(path)
    try:
        facts = from_json(Facts, json.loads(metadata.get("facts", "")), where="facts")
    except (ValueError, RecursionError) as error:
        raise ArtefactError(
            f"{path} does not say at which step it was written ({first_line(error)}); start a new run."
        ) from error
    counts = (
        facts.step,
        facts.at,
        facts.position,
        facts.epoch,
        facts.averaged,
        facts.scale_steps,
        facts.ranks - 1,
        facts.lanes - 1,
        (1 if facts.limit is None else facts.limit) - 1,
    )
    if min(counts) < 0 or max(counts) >= 1 << 40 or facts.scale <= 0 or facts.step > steps:
        raise ArtefactError(
            f"{path} was written at step {facts.step} of {steps}, or is damaged; start a new run."
        )
    return facts
