"""The checkpoint from which training resumes: the whole state of `Training` in one file.

`training.safetensors` holds the weights, the optimiser's state, the average, the memory of every lane and the
random state of every process. Its metadata holds `Facts`. This file is written first. If the weights are the
best so far, `model.safetensors` is written after it. A kill between the two is repaired when the run is
resumed.

A function that is called collective must be called by all processes of the run at the same time.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, first_line
from runtimes.base.records import to_json
from trainer.run.checkpoint import MODEL, STATE, load_metadata, load_tensors, save_tensors
from trainer.run.history import Facts, best, read_facts
from trainer.training.loss_scale import loss_scale, set_loss_scale
from trainer.training.optimizer import optimizer_tensors
from trainer.training.state import Training, refuse_infinite


def snapshot(training: Training) -> dict[str, Tensor]:
    """The whole state as named tensors, with the memory of all lanes. Collective.

    Tensors that training updates in place share their storage with the result.
    """
    memory = [torch.cat(parts) for parts in zip(*training.memories, strict=True)]
    named = {f"memory.{layer}": training.ranks.gather(tensor) for layer, tensor in enumerate(memory)}
    return (
        _shared(training)
        | named
        | {"random": training.ranks.gather(_random_state(training.ranks.device)[None])}
    )


def facts_of(training: Training, text: str) -> Facts:
    """The rest of the state, equal on every process. text: hashes of the texts that the run reads."""
    scale, scale_steps = loss_scale(training.scaler)
    return Facts(
        text=text,
        step=training.step,
        at=training.at,
        position=training.position,
        averaged=0 if training.average is None else int(training.average.n_averaged),
        scale=scale,
        scale_steps=scale_steps,
        ranks=training.ranks.count,
        validations=tuple(training.validations),
    )


def write(training: Training, tensors: dict[str, Tensor], folder: Path, text: str) -> None:
    """Writes the tensors of `snapshot(training)`, and then the weights for export if they are the best."""
    save_tensors(folder / STATE, tensors, {"facts": json.dumps(to_json(facts_of(training, text)))})
    if training.is_best:
        _write_model(training, folder)


def save(training: Training, folder: Path, text: str) -> None:
    """Writes a snapshot, on the first process. Collective. Raises UserError if the state is not finite."""
    tensors = snapshot(training)
    if broken := _not_finite(tensors):
        refuse_infinite(*broken, training.step, training.ranks)
    training.ranks.on_first(lambda: write(training, tensors, folder, text))


def restore(training: Training, run: Path, text: str) -> None:
    """Brings a new `Training` to the last checkpoint of `run`.

    text: hashes of the texts that this process has read. They must be those of the checkpoint. Every process
    takes its share of the lanes' memory, so there may be more or fewer processes than before. Raises
    ArtefactError for a file that is damaged or belongs to another model, and ConfigError for another text.
    """
    path, config, ranks = run / STATE, training.config, training.ranks
    facts = read_facts(path, config.steps)
    # Older checkpoints store the hash of the training text alone.
    if facts.text not in (text, text.partition("-")[0]):
        part = "validated" if facts.text.startswith(text.partition("-")[0]) else "trained"
        raise ConfigError(
            f"the text that {run} was {part} on has changed since; restore it, or start a new run."
        )
    training.step, training.at, training.position = facts.step, facts.at, facts.position
    training.validations = list(facts.validations)
    shared = _shared(training)
    # The file holds the memory of all lanes and one random state for each process that there was. Only their
    # shapes are needed to check it, so they are made on the device `meta`, which takes no memory.
    with torch.device("meta"):
        whole = training.model.start(config.batch, training.rule)
        lanes = {f"memory.{layer}": torch.empty(tensor.shape) for layer, tensor in enumerate(whole)}
        random = torch.empty(facts.ranks, len(_random_state(ranks.device)), dtype=torch.uint8)
    # The whole file is checked before anything is changed, so a damaged file leaves no half-restored state.
    saved, _ = load_tensors(path, expected=shared | lanes | {"random": random})
    if broken := _not_finite(saved):
        raise ArtefactError(
            f"{path} cannot be used, because {broken[0]} holds {broken[1]}; start a new run with a lower "
            "optimizer.lr."
        )
    # The optimiser and the average hold on to their tensors, so the values are copied into them.
    for name, tensor in shared.items():
        tensor.copy_(saved[name])
    parts = [ranks.share(saved[name]).to(ranks.device).chunk(config.accumulate) for name in lanes]
    training.memories = [list(memory) for memory in zip(*parts, strict=True)]
    if training.average is not None:
        training.average.n_averaged.fill_(facts.averaged)
    set_loss_scale(training.scaler, facts.scale, facts.scale_steps)
    if ranks.rank < facts.ranks:
        # A row of the tensor shares the storage of all rows, and PyTorch would read the storage from its
        # start: `clone`.
        _set_random_state(ranks.device, saved["random"][ranks.rank].clone(), path)
    else:
        # There was no such process before. It gets a state of its own, that no process has had at this step.
        torch.manual_seed(config.seed + ranks.rank + facts.step)


def mend(training: Training, run: Path) -> None:
    """Makes `model.safetensors` the best weights again if a kill came before it was written."""
    leader = best(training.validations)
    if training.is_best:
        _write_model(training, run)
    elif leader is not None and load_metadata(run / MODEL).get("step") != str(leader.step):
        raise ArtefactError(
            f"{run / MODEL} does not hold the weights of step {leader.step}, the best of this run; copy the "
            "run again."
        )


def _write_model(training: Training, folder: Path) -> None:
    save_tensors(folder / MODEL, training.weights.state_dict(), {"step": str(training.step)})


def _shared(training: Training) -> dict[str, Tensor]:
    """The tensors that are the same on every process and that training updates in place.

    They are the weights, the optimiser's state and the average.
    """
    named = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    named |= optimizer_tensors(training.optimizer, training.model)
    if training.average is not None:
        named |= {f"average.{name}": tensor for name, tensor in training.average.module.state_dict().items()}
    return named


def _not_finite(tensors: dict[str, Tensor]) -> tuple[str, float] | None:
    """Name of a tensor that holds NaN or infinity, and the value; None if all numbers are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (finite := tensor.isfinite()).all():
            return name, float(tensor[~finite][0])
    return None


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor, path: Path) -> None:
    try:
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
    except RuntimeError as error:
        raise ArtefactError(
            f"{path} holds a random state that PyTorch does not accept ({first_line(error)}); start a new "
            "run."
        ) from error
