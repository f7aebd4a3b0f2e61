"""The checkpoint that training resumes from: everything in `Training`, as one file that appears atomically.

`training.safetensors` holds the weights, the optimiser's state, the average, the memory of every lane and the random state of
every process, and `Facts` as its metadata. It is written first; then `model.safetensors`, where the weights are the best so far.
A kill between the two is mended when the run is resumed. What is said to be collective is called by all processes of `torchrun`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, first_line
from runtimes.base.records import from_json, to_json
from trainer.run.checkpoint import MODEL, STATE, load_metadata, load_tensors, save_tensors
from trainer.training.optimizer import optimizer_tensors
from trainer.training.state import Training, refuse_infinite
from trainer.training.validation import Validation, best


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a checkpoint says besides its tensors.

    text: hashes of the training and the held-out text. at: where the next segment begins in the lanes. position: of that
    segment in its streams. averaged: how many weights are in the average. scale, scale_steps: fp16 loss scale, and steps
    since it changed. ranks: processes whose random states are held.
    """

    text: str
    step: int
    at: int
    position: int
    averaged: int
    scale: float
    scale_steps: int
    ranks: int
    validations: tuple[Validation, ...]


def snapshot(training: Training) -> dict[str, Tensor]:
    """The whole state as named tensors, sharing storage where it is updated in place; the memory of all lanes. Collective."""
    memory = [torch.cat(parts) for parts in zip(*training.memories, strict=True)]
    named = {f"memory.{layer}": training.ranks.gather(tensor) for layer, tensor in enumerate(memory)}
    return (
        _shared(training)
        | named
        | {"random": training.ranks.gather(_random_state(training.ranks.device)[None])}
    )


def facts_of(training: Training, text: str) -> Facts:
    """The rest of the state, the same on every process; text: hashes of what is read."""
    scale = training.scaler.state_dict() or {"scale": 1.0, "_growth_tracker": 0}
    return Facts(
        text=text, step=training.step, at=training.at, position=training.position,
        averaged=0 if training.average is None else int(training.average.n_averaged),
        scale=scale["scale"], scale_steps=scale["_growth_tracker"], ranks=training.ranks.count,
        validations=tuple(training.validations),
    )  # fmt: skip


def write(training: Training, tensors: dict[str, Tensor], folder: Path, text: str) -> None:
    """Writes the checkpoint of `snapshot(training)`: what resuming reads, then, if best, the weights that others read."""
    save_tensors(folder / STATE, tensors, {"facts": json.dumps(to_json(facts_of(training, text)))})
    if training.is_best:
        _write_model(training, folder)


def save(training: Training, folder: Path, text: str) -> None:
    """Snapshot and write, the latter by the first process. Collective; raises UserError for a state that is not finite."""
    tensors = snapshot(training)
    if broken := _not_finite(tensors):
        refuse_infinite(*broken, training.step, training.ranks)
    training.ranks.on_first(lambda: write(training, tensors, folder, text))


def restore(training: Training, run: Path, text: str) -> None:
    """Brings a new `Training` to the last checkpoint of `run`; `text` must be the hashes of what it has read.

    Every process takes its share of the lanes' memory, so there may be more or fewer of them than before. Raises ArtefactError
    for a file that is damaged or another model's, ConfigError for another text.
    """
    path, config, ranks = run / STATE, training.config, training.ranks
    facts = _read_facts(path, config.steps)
    if facts.text not in (text, text.partition("-")[0]):  # older checkpoints know the training text alone
        part = "validated" if facts.text.startswith(text.partition("-")[0]) else "trained"
        raise ConfigError(
            f"the text that {run} was {part} on has changed since; restore it, or start a new run."
        )
    training.step, training.at, training.position = facts.step, facts.at, facts.position
    training.validations = list(facts.validations)
    shared = _shared(training)
    with torch.device("meta"):  # shapes alone: of all lanes, and of as many processes as there were
        whole = training.model.start(config.batch, training.rule)
        lanes = {f"memory.{layer}": torch.empty(tensor.shape) for layer, tensor in enumerate(whole)}
        random = torch.empty(facts.ranks, len(_random_state(ranks.device)), dtype=torch.uint8)
    saved, _ = load_tensors(path, expected=shared | lanes | {"random": random})
    if broken := _not_finite(saved):
        raise ArtefactError(
            f"{path} is of no use: {broken[0]} holds {broken[1]}; start a new run with a lower learning_rate."
        )
    for name, tensor in shared.items():
        tensor.copy_(saved[name])
    parts = [ranks.share(saved[name]).to(ranks.device).chunk(config.accumulate) for name in lanes]
    training.memories = [list(memory) for memory in zip(*parts, strict=True)]
    if training.average is not None:
        training.average.n_averaged.fill_(facts.averaged)
    if training.scaler.is_enabled():
        scale = {"scale": facts.scale, "_growth_tracker": facts.scale_steps}
        training.scaler.load_state_dict(training.scaler.state_dict() | scale)
    if ranks.rank < facts.ranks:
        _set_random_state(
            ranks.device, saved["random"][ranks.rank].clone(), path
        )  # PyTorch reads the start of the storage
    else:  # one process more than there were
        torch.manual_seed(config.seed + ranks.rank + facts.step)


def mend(training: Training, run: Path) -> None:
    """Makes `model.safetensors` the best weights again, where a kill came before it was written."""
    leader = best(training.validations)
    if training.is_best:
        _write_model(training, run)
    elif leader is not None and load_metadata(run / MODEL).get("step") != str(leader.step):
        raise ArtefactError(
            f"{run / MODEL} is not of step {leader.step}, the best of this run; copy the run again."
        )


def _write_model(training: Training, folder: Path) -> None:
    save_tensors(folder / MODEL, training.weights.state_dict(), {"step": str(training.step)})


def _shared(training: Training) -> dict[str, Tensor]:
    """What is the same on every process and updated in place: weights, the optimiser's state, the average."""
    named = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    named |= optimizer_tensors(training.optimizer, training.model)
    if training.average is not None:
        named |= {f"average.{name}": tensor for name, tensor in training.average.module.state_dict().items()}
    return named


def _not_finite(tensors: dict[str, Tensor]) -> tuple[str, float] | None:
    """Name and value of a number that is none."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (finite := tensor.isfinite()).all():
            return name, float(tensor[~finite][0])
    return None


def _read_facts(path: Path, steps: int) -> Facts:
    metadata = load_metadata(path)
    try:
        facts = from_json(Facts, json.loads(metadata.get("facts", "")), where="facts")
    except (ValueError, RecursionError) as error:
        raise ArtefactError(
            f"{path} does not say which step it was made at ({first_line(error)}); start a new run."
        ) from error
    counts = (facts.step, facts.at, facts.position, facts.averaged, facts.scale_steps, facts.ranks - 1)
    if min(counts) < 0 or max(counts) >= 1 << 40 or facts.scale <= 0 or facts.step > steps:
        raise ArtefactError(
            f"{path} was made at step {facts.step} of {steps}, or is damaged; start a new run."
        )
    return facts


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor, path: Path) -> None:
    try:
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
    except RuntimeError as error:
        raise ArtefactError(
            f"{path} holds a random state that is none ({first_line(error)}); start a new run."
        ) from error
