"""What a run has recorded of its training: steps, validations, sizes, speed, curves. Loads no PyTorch."""

from __future__ import annotations

import json
import math
import os
import statistics
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, UserError, first_line
from runtimes.base.files import open_file, read_bytes, read_json, reading, write_json
from runtimes.base.records import from_json, to_json
from runtimes.contract.sampling import SAMPLING, read_sampling, write_sampling
from runtimes.contract.spec import VOCAB
from trainer.run.config import TrainConfig

# Files of a run.
CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
STATE = "training.safetensors"
SHA256 = "tensors_sha256"  # in the metadata of a file of tensors
MAX_HEADER = 100_000_000  # bytes, as the library of safetensors limits it
# The unit of the score of one token, for vocabularies whose tokens each are one unit of the text.
UNITS = {"byte": "byte", "char": "character"}
NO_WEIGHTS = ("auxiliary.", "positions.frequencies")  # classifiers of training, and a constant
Values = list[tuple[int, float]]  # of a key, with their steps
Curve = tuple[tuple[int, int, float], ...]  # (step, tokens trained until then, bits per token)


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
    lanes: int
    """Number of lanes of every validation. It stays as it was when the run began, because scores are
    compared.
    """
    limit: int | None
    """The most tokens of every validation, constant like `lanes`; None for all."""
    final: float | None  # bits per token of the whole held-out text at the end of training; None before
    held_out: str | None  # the SHA-256 of the held-out text, as `Source` has it


def best(history: Sequence[Validation]) -> Validation | None:
    """The first validation with the lowest score, or None if there is no validation."""
    return min(history, key=lambda validation: validation.bits_per_token, default=None)


@dataclass(frozen=True, kw_only=True)
class History:
    """The training of a run."""

    config: TrainConfig
    facts: Facts | None  # of its last checkpoint; None if its file is damaged

    def describe(self) -> dict[str, Any]:
        """What `info` says of the training, as JSON; step is None if the checkpoint is damaged."""
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
    def trained_tokens(self) -> int | None:
        """Number of tokens that the weights of the run have read; None if the checkpoint is damaged."""
        if self.facts is None:
            return None
        leader = best(self.facts.validations)
        return tokens_after(self.config, leader.step if leader else self.facts.step)

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
            return (
                "this run was never validated, so its quality is unknown; continue it with "
                "`xl-export train --resume RUN`, or train on a longer text with a smaller validate_every."
            )
        uniform = math.log2(vocab_size)
        if leader.bits_per_token <= uniform or vocab_size == 1:
            return None
        return (
            f"the best validation of this run is {leader.bits_per_token:.4g} bits/token, worse than the "
            f"{uniform:.4g} of a model that gives every token the same probability; train longer, or with a "
            "lower optimizer.lr."
        )


def read_config(run: Path) -> TrainConfig:
    """The configuration of a run; raises UserError.

    How tokens are drawn is in `sampling.json`, which `xl-export set` changes. Earlier releases wrote it into
    `config.json` too, and it may be out of date there.
    """
    document = read_json(run / CONFIG)
    if isinstance(document, dict) and "model_type" in document:
        raise ArtefactError(
            f"{run} is a Hugging Face folder with the model_type {document['model_type']!r:.40}; make an "
            f"artefact of it with `xl-export export {run} --out ARTEFACT`."
        )
    config = TrainConfig.from_json(document, where=str(run / CONFIG))
    return replace(config, sampling=read_sampling(run)) if os.path.lexists(run / SAMPLING) else config


def write_config(run: Path, config: TrainConfig) -> None:
    """Writes the configuration of a run as `config.json` and `sampling.json`."""
    write_json(run / CONFIG, {key: value for key, value in to_json(config).items() if key != "sampling"})
    write_sampling(run, config.sampling)


def history_of(run: Path, config: TrainConfig) -> History | None:
    """The training of a run; None for a run that was imported, and so has no checkpoint to resume from.

    config: the run's, from `read_config`.
    """
    if not (run / STATE).is_file():
        return None
    try:
        return History(config=config, facts=read_facts(run / STATE, config.steps))
    except UserError:  # neither an export nor `info` needs that file
        return History(config=config, facts=None)


def read_facts(path: Path, steps: int) -> Facts:
    """The facts of a checkpoint; raises ArtefactError for a file that is missing, damaged or impossible."""
    try:
        text = read_header(path)["__metadata__"]["facts"]
        facts = from_json(Facts, json.loads(text), where="facts")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtefactError(
            f"{path} does not say at which step it was written ({first_line(error)}); start a new run."
        ) from error
    counts = (facts.step, facts.at, facts.position, facts.epoch, facts.averaged, facts.scale_steps)
    sizes = (facts.ranks, facts.lanes, 1 if facts.limit is None else facts.limit)
    possible = min(counts) >= 0 and min(sizes) > 0 and max(counts + sizes) < 1 << 40 and facts.scale > 0
    if not possible or facts.step > steps:
        raise ArtefactError(
            f"{path} was written at step {facts.step} of {steps}, or is damaged; start a new run."
        )
    return facts


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: the type and shape of each tensor, and `__metadata__`.

    Raises UserError for a file that is missing, and ArtefactError for one without such a header.
    """
    try:
        with reading(path), open_file(path) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, MAX_HEADER)))
    except (struct.error, ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged ({first_line(error)}); copy the run again.") from error
    if not isinstance(header, dict):
        raise ArtefactError(f"{path} is damaged; copy the run again.")
    return header


@dataclass(frozen=True, kw_only=True)
class Record:
    """The training of one run. A number is None if the run did not record it."""

    path: str
    steps: int  # number of steps done
    planned: int  # number of steps of the whole training
    parameters: int | None  # number of trained values
    tokens: int  # number of tokens trained
    best_bits: float | None
    """The best validation, in bits per token."""
    best_step: int | None
    """Step of the best validation."""
    final_bits: float | None  # the score of the whole held-out text at the end
    unit: str | None
    """`byte` or `character`, the unit of `bits_per_unit`."""
    bits_per_unit: float | None
    """The best validation for each unit of the text."""
    held_out: str | None  # the SHA-256 of the held-out text
    validate_tokens: int | None  # the most that a validation scores; None for the whole held-out text
    learning_rate: float  # highest of the schedule
    tokens_per_second: float | None  # the median of what was logged
    seconds: float | None  # duration of training, with validations
    training: Curve
    validations: Curve


def runs_in(path: Path) -> list[Path]:
    """The run in a folder, or the runs in its folders; raises ArtefactError if there is none."""
    if (path / METRICS).is_file():
        return [path]
    found = sorted(metrics.parent for metrics in path.glob(f"*/{METRICS}"))
    if not found:
        raise ArtefactError(
            f"{path} is neither a run nor a folder of runs, because it has no {METRICS}; make a run with "
            "`xl-export train --out RUN`."
        )
    return found


def read_record(run: Path) -> Record:
    """What the run in a folder has recorded; raises UserError that names the file that cannot be used."""
    config = read_config(run)
    history = history_of(run, config)
    lines = read_metrics(run / METRICS)
    validations = values_of(lines, "validation_bits_per_token")
    steps = max((line["step"] for line in lines), default=0)
    best = min(validations, key=lambda point: point[1], default=None)
    unit, bits_per_unit = _per_unit(run, lines, best)
    speeds = [value for _, value in values_of(lines, "tokens_per_second")]
    final = values_of(lines, "final_validation_bits_per_token")
    seconds = values_of(lines, "seconds")
    return Record(
        path=str(run),
        steps=steps,
        planned=config.steps,
        parameters=_parameters(run / MODEL),
        tokens=tokens_after(config, steps),
        best_bits=best[1] if best else None,
        best_step=best[0] if best else None,
        final_bits=final[-1][1] if final else None,
        unit=unit,
        bits_per_unit=bits_per_unit,
        held_out=history.facts.held_out if history and history.facts else None,
        validate_tokens=config.validate_tokens,
        learning_rate=config.optimizer.lr,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds[-1][1] if seconds else None,
        training=_curve(config, values_of(lines, "bits_per_token")),
        validations=_curve(config, validations),
    )


def tokens_after(config: TrainConfig, steps: int) -> int:
    """Number of tokens that the first `steps` steps of training read."""
    total = 0
    at = 0
    segment = config.training.segment
    for start, longer in (*config.segment_schedule, (steps, 0)):
        total += max(0, min(start, steps) - at) * segment
        at = min(start, steps)
        segment = longer
    return total * config.batch


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of the metrics; a line that a kill cut short is left out.

    Raises ArtefactError for a file without one whole line among others.
    """
    written = read_bytes(path).decode("utf-8", errors="replace").splitlines()
    lines = []
    for text in written:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] <= 1 << 40:
            lines.append(line)
    if len(written) > 1 and not lines:
        raise ArtefactError(f"{path} holds no line of a training; it is damaged, or of another program.")
    return lines


def values_of(lines: Sequence[dict[str, Any]], key: str) -> Values:
    """The finite numbers of a key."""
    return [
        (line["step"], float(line[key]))
        for line in lines
        if type(line.get(key)) in (int, float) and abs(line[key]) <= sys.float_info.max
    ]


def _curve(config: TrainConfig, values: Values) -> Curve:
    return tuple((step, tokens_after(config, step), bits) for step, bits in values)


def _per_unit(
    run: Path, lines: Sequence[dict[str, Any]], best: tuple[int, float] | None
) -> tuple[str | None, float | None]:
    """The unit of the text and the best score for each, if tokens are units or it was recorded."""
    recorded = dict(values_of(lines, "validation_bits_per_byte"))
    if best and best[0] in recorded:
        return "byte", recorded[best[0]]
    vocabulary = read_json(run / VOCAB)
    unit = UNITS.get(str(vocabulary.get("kind"))) if isinstance(vocabulary, dict) else None
    return unit, best[1] if best and unit else None


def _parameters(path: Path) -> int | None:
    """The number of weights in a safetensors file, from its header; None if it cannot be read."""
    try:
        shapes = {name: facts["shape"] for name, facts in read_header(path).items() if name != "__metadata__"}
        counts = [math.prod(shape) for name, shape in shapes.items() if not name.startswith(NO_WEIGHTS)]
        return int(sum(counts))
    except (UserError, TypeError, KeyError):
        return None
