"""The checkpoint from which training resumes: the whole state of `Training` in one file.

`training.safetensors` holds the weights, the optimiser's state, the average, the memory of every lane and the
random state of every process. Its metadata holds `Facts`. This file is written first. If the weights are the
best so far, `model.safetensors` is written after it. A kill between the two is repaired when the run is
resumed.

A function that is called collective must be called by all processes of the run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, first_line
from runtimes.base.records import json_text, to_json
from trainer.run.checkpoint import load_tensors, save_tensors
from trainer.run.history import MODEL, STATE, Facts, best, read_facts
from trainer.training.optimizer import optimizer_tensors
from trainer.training.shard import assign, local, whole
from trainer.training.state import Training, refuse_infinite

# The only private part of PyTorch that is used here: `GradScaler.state_dict()` is public, but this key of it
# starts with an underscore. It is the number of steps since the scale changed, which a run needs in order to
# resume with the same bits. Checked with PyTorch 2.13.
SCALE_STEPS = "_growth_tracker"


def snapshot(training: Training) -> dict[str, Tensor]:
    """The whole state as named tensors. Collective.

    The memory of all lanes, the random states and the whole of a sharded tensor are only on the host of the
    first process. Tensors that training updates in place share their storage with the result unless they are
    sharded.
    """
    named: dict[str, Tensor | None] = {**_wholes(training)}
    # One layer after another, so that a GPU holds no more than one layer's memory of all lanes.
    for layer, parts in enumerate(zip(*training.memories, strict=True)):
        named[f"memory.{layer}"] = training.ranks.gather_on_first(torch.cat(parts))
    named["random"] = training.ranks.gather_on_first(_random_state(training.ranks.device)[None])
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def facts_of(training: Training) -> Facts:
    """The rest of the state, equal on every process."""
    scaler = training.scaler.state_dict()  # empty if the loss is not scaled
    return Facts(
        text=training.text,
        step=training.step,
        at=training.at,
        position=training.position,
        averaged=0 if training.average is None else int(training.average.n_averaged),
        scale=scaler.get("scale", 1.0),
        scale_steps=scaler.get(SCALE_STEPS, 0),
        ranks=training.ranks.count,
        validations=tuple(training.validations),
        epoch=training.epoch,
        lanes=training.validation_extent[0],
        limit=training.validation_extent[1],
        final=training.final,
        held_out=training.held_out,
    )


def save(training: Training, writer: Writer) -> None:
    """Copies a snapshot; `writer` writes it on the first process while training continues. Collective.

    Raises UserError if the state is not finite, or if an earlier checkpoint could not be written.
    """
    tensors = snapshot(training)
    if broken := training.ranks.on_first(lambda: _not_finite(tensors)):
        refuse_infinite(*broken, training.step, training.ranks)
    # A run that resumes from here reads its spans anew. The same bits need the same readings in this one.
    training.span_lengths.forget()

    def start() -> None:
        writer.wait()  # before more copies need memory
        writer.start(training, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})

    training.ranks.on_first(start)


class Writer:
    """Writes one checkpoint of a run's folder at a time, on a thread; leaving its block waits for the last.

    An error of the thread is raised by the next call.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[None] | None = None

    def start(self, training: Training, tensors: dict[str, Tensor]) -> None:
        """Begins to write the tensors of a snapshot, and then the weights for export if they are the best.

        The tensors must not change until they are written, and an earlier checkpoint must have been waited
        for.
        """
        assert self._work is None
        model = _weights(training, tensors) if training.is_best else None
        facts = facts_of(training)
        self._work = self._thread.submit(_write, self.folder, tensors, facts, model)

    def check(self) -> None:
        """Raises the error of work that has ended, and waits for nothing."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the work is done; raises its error."""
        work = self._work
        self._work = None
        if work is not None:
            work.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()


def restore(training: Training, run: Path) -> None:
    """Brings a new `Training` to the last checkpoint of `run`.

    Every process takes its share of the lanes' memory, so there may be more or fewer processes than before.
    Raises ArtefactError for a file that is damaged or belongs to another model, and ConfigError for another
    text.
    """
    path = run / STATE
    config = training.config
    ranks = training.ranks
    facts = read_facts(path, config.steps)
    if facts.text != training.text:
        part = "validated" if facts.text.startswith(training.text.partition("-")[0]) else "trained"
        raise ConfigError(
            f"the text that {run} was {part} on has changed since; restore it, or start a new run."
        )
    training.step = facts.step
    training.at = facts.at
    training.position = facts.position
    training.epoch = facts.epoch
    training.validations = list(facts.validations)
    training.validation_extent = facts.lanes, facts.limit
    # A run whose steps were raised continues, and its last score is then not the final one.
    training.final = facts.final if training.finished else None
    shared = _shared(training)
    # The file holds the memory of all lanes and one random state for each process that there was. Only the
    # shapes of the memory are needed to check it, so it is made on the device `meta`, which takes none.
    with torch.device("meta"):
        M = training.rule.mem_len
        lanes = {
            f"memory.{layer}": torch.empty(config.batch, M, tensor.shape[-1])
            for layer, tensor in enumerate(training.memories[0])
        }
    # The whole file is checked before anything is changed, so a damaged file leaves no half-restored state.
    saved, _ = load_tensors(path, expected={**shared, **lanes, "random": None})
    if broken := _not_finite(saved):
        raise ArtefactError(
            f"{path} cannot be used, because {broken[0]} holds {broken[1]}; start a new run with a lower "
            "optimizer.lr."
        )
    # The optimiser and the average hold on to their tensors, so the values are copied into them.
    for name, tensor in shared.items():
        assign(tensor, saved[name])
    parts = [ranks.share(saved[name]).to(ranks.device).chunk(config.accumulate) for name in lanes]
    training.memories = [list(memory) for memory in zip(*parts, strict=True)]
    if training.average is not None:
        training.average.n_averaged.fill_(facts.averaged)
    scale = {"scale": facts.scale, SCALE_STEPS: facts.scale_steps}
    training.scaler.load_state_dict(training.scaler.state_dict() | scale)  # nothing if it is not enabled
    if ranks.rank < facts.ranks and saved["random"].shape[-1] == len(_random_state(ranks.device)):
        # A row of the tensor shares the storage of all rows, and PyTorch would read the storage from its
        # start: `clone`.
        _set_random_state(ranks.device, saved["random"][ranks.rank].clone(), path)
    else:
        # There was no such process before, or it was on another kind of device. It gets a state of its own,
        # that no process has had at this step.
        torch.manual_seed(config.seed + ranks.rank + facts.step)


@contextmanager
def best_weights(training: Training, writer: Writer) -> Iterator[None]:
    """A block in which `training.weights` holds the weights of the best validation. Collective.

    If those are older, they are read from `model.safetensors` once it is written. After the block the last
    weights are back, bit for bit.
    """
    if training.is_best:
        yield
        return
    own = dict(training.weights.state_dict())
    kept = {name: local(tensor).to("cpu", copy=True) for name, tensor in own.items()}
    stored: dict[str, Tensor] = {}

    def read() -> None:
        writer.wait()
        stored.update(load_tensors(writer.folder / MODEL, expected=own)[0])

    training.ranks.on_first(read)
    for name, tensor in own.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        assign(tensor, training.ranks.from_first(stored.get(name, empty)))
    try:
        yield
    finally:
        for name, tensor in own.items():
            local(tensor).copy_(kept[name])


def repair_best(training: Training, run: Path) -> None:
    """Makes `model.safetensors` the best weights again if a kill came before it was written. Collective."""
    leader = best(training.validations)
    tensors = _wholes(training) if training.is_best else {}

    def work() -> None:
        if training.is_best:
            _write_model(run, _weights(training, tensors), training.step)
        elif leader is not None:
            _, stored = load_tensors(run / MODEL, expected=training.weights.state_dict())
            if stored.get("step") != str(leader.step):
                raise ArtefactError(
                    f"{run / MODEL} does not hold the weights of step {leader.step}, the best of this run; "
                    "copy the run again."
                )

    training.ranks.on_first(work)


def _write(folder: Path, tensors: dict[str, Tensor], facts: Facts, model: dict[str, Tensor] | None) -> None:
    """Writes the state, and then the weights for export where these are the best."""
    save_tensors(folder / STATE, tensors, {"facts": json_text(to_json(facts))})
    if model is not None:
        _write_model(folder, model, facts.step)


def _write_model(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    save_tensors(folder / MODEL, weights, {"step": str(step)})


def _weights(training: Training, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors of a snapshot that are the weights for export, under their names in the model."""
    prefix = "model." if training.weights is training.model else "average."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _shared(training: Training) -> dict[str, Tensor]:
    """The tensors that are the same on every process and that training updates in place.

    They are the weights, the optimiser's state and the average.
    """
    named = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    named |= optimizer_tensors(training.optimizer, training.model)
    if training.average is not None:
        named |= {f"average.{name}": tensor for name, tensor in training.average.module.state_dict().items()}
    return named


def _wholes(training: Training) -> dict[str, Tensor]:
    """`_shared`, with each sharded tensor whole on the host, only on the first process. Collective."""
    named = {}
    for name, tensor in _shared(training).items():
        value = whole(tensor)
        if value is tensor:
            named[name] = tensor
        elif training.ranks.is_first:
            named[name] = value.cpu()
    return named


def _not_finite(tensors: dict[str, Tensor]) -> tuple[str, float] | None:
    """Name of a tensor that holds NaN or infinity, and the value; None if all numbers are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (finite := tensor.isfinite()).all():
            return name, float(tensor[~finite][0])
    return None


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor, path: Path) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            (torch.mps if device.type == "mps" else torch).set_rng_state(state)
    except RuntimeError as error:
        raise ArtefactError(
            f"{path} holds a random state that PyTorch does not accept ({first_line(error)}); start a new "
            "run."
        ) from error
