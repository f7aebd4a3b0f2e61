"""Training with segment recurrence: from a text to a run, which can be resumed from its last checkpoint.

The training text is cut into B lanes, contiguous parts of equal length. A step reads the next T tokens of
every lane, and the memory of a lane is carried from one segment to the next (Dai et al. 2019, section 3.2).
At the end of the lanes the streams start again at position 0. Under several processes each one has its share
of the lanes, and the first one writes.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ConfigError
from runtimes.base.folders import atomic_folder, refuse_existing, refuse_no_folder
from runtimes.base.kinds import RUN
from runtimes.base.lock import only_writer
from runtimes.base.partial import sweep
from runtimes.base.progress import Progress
from runtimes.contract.spec import VOCAB
from runtimes.contract.vocabulary import save_vocab
from trainer.data.source import Source, load_source, with_vocab_size
from trainer.model.model import LanguageModel
from trainer.model.model import parameter_shapes as sizes
from trainer.run.checkpoint import load_run, matching_vocab, refuse_no_run
from trainer.run.choices import VOCAB_KINDS
from trainer.run.config import TrainConfig
from trainer.run.history import METRICS, MODEL, STATE, Validation, best, read_config, write_config
from trainer.training.parallel import Ranks, joined
from trainer.training.plan import steps_in_time
from trainer.training.reporting.journal import check_packages
from trainer.training.reporting.report import Report
from trainer.training.reporting.sample import sample_text
from trainer.training.snapshot import Writer, best_weights, facts_of, repair_best, restore, save, snapshot
from trainer.training.state import Training, refuse_infinite
from trainer.training.validation import out_of_patience, validate


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    minutes: float | None = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """The folder of a new run, trained as the configuration says.

    minutes: the time that was planned for it. If training turns out slower, it has fewer steps, and its
    learning rate follows the shorter schedule from there on. For one process.

    The folder appears as a whole, with its held-out texts and a checkpoint of step 0. Raises UserError if
    `out` exists (`force` replaces an earlier run), if the text does not fit the configuration, or if the loss
    is not finite.
    """
    out = Path(out)
    check_packages(config)
    with joined(config.device) as ranks, ExitStack() as held:
        progress = progress and ranks.is_first
        vocab = None if config.vocab in VOCAB_KINDS else config.vocab
        named = {"text": config.text, "data": config.data, "vocab": vocab, "start_from": config.start_from}
        paths = {name: Path(path) for name, path in named.items() if path is not None}
        sources = [path for name, path in paths.items() if name != "start_from"]
        ranks.on_first(lambda: refuse_existing_run(out, force=force, sources=sources))
        if config.data is not None:
            refuse_no_folder(paths["data"], give="a prepared dataset")  # with the path as it was typed
        # The run stores absolute paths, so that it can be resumed from any working folder.
        absolute: Any = {name: str(path.resolve()) for name, path in paths.items() if path.exists()}
        config = dataclasses.replace(config, **absolute)
        source = load_source(config)
        start = None if config.start_from is None else load_run(Path(config.start_from))
        if start is not None and source.vocab.to_json() != start.vocab.to_json():
            raise ConfigError(
                f"{config.data or source.name} has another vocabulary ({source.vocab.size:,} tokens) than "
                f"{config.start_from} ({start.vocab.size:,} tokens), the run to start from; use the {VOCAB} "
                "of that run."
            )
        config = with_vocab_size(config, source.vocab)
        if start is not None and sizes(config.model) != sizes(start.model.config):
            raise ConfigError(
                f"start_from is {config.start_from}, whose model sizes differ from the new run's; leave "
                "out changes of sizes."
            )
        _check_held_out(config, source.valid)
        # Processes on different machines may have been given different files, which would train without an
        # error.
        ranks.agree("configurations or texts", f"{config} {source.digest}")
        training = _start(config, ranks, source, weights=start.model if start else None, progress=progress)
        # The memory of all lanes is collected by all processes together, so it happens before the first one
        # writes by itself.
        tensors = snapshot(training)

        def make_folder() -> None:
            replaces = force and (out / METRICS).is_file()
            old = only_writer(out, doing="replaced") if replaces else nullcontext()
            new = atomic_folder(out, RUN, force=force, sources=sources)
            with old, new as folder:
                write_config(folder, config)
                save_vocab(folder, source.vocab)
                for name, content in source.files.items():
                    if isinstance(content, bytes):
                        (folder / name).write_bytes(content)
                    else:
                        np.save(folder / name, content)  # from the memory map, without a copy in memory
                (folder / METRICS).touch()
                with Writer(folder) as writer:
                    writer.start(training, tensors)
            held.enter_context(only_writer(out, doing="trained"))

        ranks.on_first(make_folder)
        _continue(training, out, source, minutes=minutes, progress=progress)
    return out


def resume(
    run: Path | str,
    *,
    steps: int | None = None,
    device: str | None = None,
    text: Path | str | None = None,
    data: Path | str | None = None,
    progress: bool = True,
) -> Path:
    """The folder of a run that was continued from its last checkpoint.

    steps: the new number of steps of the whole training, to train a run for longer than was configured. The
    learning rate then follows the schedule of that many steps from here on: after a cosine it rises again,
    and falls to its lowest at the new end. What begins at a step still begins at that step. `patience`
    becomes 0, because a run that it ended would end again at once. device, text, data: in place of the
    configured ones, for another machine; the text itself must be the same.

    On the CPU, with the same number of threads and processes, every bit is as if training had never stopped.
    With another number of processes, or on another kind of device, the losses are the same up to rounding,
    and dropout draws other random numbers. Raises UserError that names the other process where one is writing
    to the run.
    """
    run = Path(run)
    config = config_of(run, steps=steps, device=device, text=text, data=data)
    check_packages(config)
    with joined(config.device) as ranks, ExitStack() as held:
        ranks.on_first(lambda: held.enter_context(only_writer(run, doing="trained")))
        progress = progress and ranks.is_first
        source = load_source(config, matching_vocab(run, config))
        training = _start(config, ranks, source, progress=progress)
        restore(training, run)
        ranks.agree("checkpoints or texts", f"{facts_of(training)}")
        # Every process has read what it needs, so what a kill left behind can be repaired.
        repair_best(training, run)
        for name in (STATE, MODEL, METRICS):
            ranks.on_first(partial(sweep, run / name))
        before = config_of(run)
        ranks.agree("numbers of steps", f"{before.steps}")  # all have read it before the first one writes it
        if config != before:
            ranks.on_first(lambda: write_config(run, config))
        if config.steps > before.steps and progress:
            print(
                f"{run} continues from step {training.step:,} to {config.steps:,}; the learning rate follows "
                f"the longer schedule from {training.rate:.3g} on"
            )
        if training.finished and progress:
            print(
                f"{run} is finished already, at step {training.step} of {config.steps}; there is nothing to "
                "continue"
            )
        _continue(training, run, source, progress=progress)
    return run


def config_of(
    run: Path,
    *,
    steps: int | None = None,
    device: str | None = None,
    text: Path | str | None = None,
    data: Path | str | None = None,
) -> TrainConfig:
    """The configuration of a run that can be resumed; raises ArtefactError for any other folder.

    The others: as in `resume`; raises ConfigError for fewer steps.
    """
    refuse_no_run(run, STATE)
    moved: dict[str, Any] = {} if device is None else {"device": device}
    for name, path in (("text", text), ("data", data)):
        if path is not None:
            moved[name] = str(Path(path).resolve())  # so that it is found from any working folder
    config = dataclasses.replace(read_config(run), **moved)
    if steps is None or steps == config.steps:
        return config
    if steps < config.steps:
        raise ConfigError(
            f"--steps is {steps:,} and {run} is configured for {config.steps:,}; give the new total number "
            "of steps, which must be larger."
        )
    return dataclasses.replace(config, steps=steps, patience=0)


def refuse_existing_run(out: Path, *, force: bool, sources: Sequence[Path]) -> None:
    """Raises UserError if a new run may not be written to `out`; sources: what it reads."""
    refuse_existing(out, RUN, force=force, sources=sources)


def _check_held_out(config: TrainConfig, held_out: np.ndarray) -> None:
    """Raises ConfigError if the recipe depends on validation and the held-out text is too short for one."""
    averaging = config.averaging is not None and config.averaging.patience is not None
    if len(held_out) < 2 and (config.schedule.kind == "plateau" or config.patience or averaging):
        raise ConfigError(
            "the held-out text has fewer than 2 tokens, and schedule plateau, patience and "
            "averaging.patience need a validation; give a longer text, or another recipe."
        )


def _start(
    config: TrainConfig,
    ranks: Ranks,
    source: Source,
    *,
    weights: LanguageModel | None = None,
    progress: bool,
) -> Training:
    """The state at step 0 of training on a source, whose note is printed."""
    if progress and source.note is not None:
        print(f"note: {source.note}", file=sys.stderr)
    training = Training.start(config, ranks, weights=weights)
    training.text = source.digest
    training.held_out = source.held_out
    return training


def _continue(
    training: Training, run: Path, source: Source, *, minutes: float | None = None, progress: bool
) -> None:
    """Trains from the present step to the end, with validations and checkpoints on the way."""
    config = training.config
    began = time.monotonic()
    validates = len(source.valid) > 1
    with Report(training, run, source, progress=progress) as report, Writer(run) as writer:
        if not validates:
            report.say(
                "the held-out text has fewer than 2 tokens, too few to validate: "
                f"{MODEL} will be the last checkpoint"
            )
        if validates and config.start_from is not None and not training.validations:
            # What fine-tuning has to beat: if it never does, these weights stay the best.
            _validate(training, source, writer, report)
            save(training, writer)
        while not training.finished:
            result = training.advance(source.tokens)
            writer.check()
            step = training.step
            last = step == config.steps
            logs = step % config.log_every == 0 or last
            validates_now = validates and (step % config.validate_every == 0 or last)
            saves = step % config.checkpoint_every == 0 or training.finished
            # Reading a loss waits for the device, so it is read only where it is used, by all alike.
            if logs or validates_now or saves:
                training.refuse_not_finite()
            report.step(result, logs=logs)
            if saves and minutes is not None and not training.finished:
                steps = steps_in_time(
                    step, config.steps, elapsed=time.monotonic() - began, seconds=60 * minutes
                )
                if steps < config.steps:
                    slower = (
                        f"step {step:,}: this machine became slower than planned, so {steps:,} steps in "
                        f"place of {config.steps:,} fit into {minutes:g} minutes"
                    )
                    try:
                        config = training.config = dataclasses.replace(config, steps=steps)
                    except ConfigError as error:  # such as a warm-up that has more steps
                        report.say(f"{slower}; training is not shortened: {error}")
                        minutes = None
                    else:
                        report.say(slower)
                        write_config(run, config)  # the checkpoint below continues with the new schedule
            with report.pace.paused():
                is_best = validates_now and _validate(training, source, writer, report)
                # The best weights are saved at once: a later checkpoint would hold other weights.
                if is_best or saves or training.finished:
                    save(training, writer)


def _validate(training: Training, source: Source, writer: Writer, report: Report) -> bool:
    """Whether the weights now score better on the held-out text than ever before.

    At the end of training the best weights are scored on the whole held-out text too. Every process scores
    its share, and all have the same number, so that all take the same decisions.
    """
    config = training.config
    ranks = training.ranks
    valid = source.valid
    lanes, limit = training.validation_extent
    report.bar.clear()

    def score(limit: int | None) -> float:
        total = -(-min(len(valid) - 1, limit or len(valid)) // ranks.count)  # of this process
        silent = nullcontext(lambda done: None)
        with Progress("validation", total, "tokens") if report.progress else silent as shown:
            bits = validate(training.weights, config, valid, ranks, lanes=lanes, limit=limit, progress=shown)
        refuse_infinite("validation score", bits, training.step, ranks)
        return bits

    bits = score(limit)
    training.validations.append(Validation(step=training.step, bits_per_token=bits))
    leader = best(training.validations)
    assert leader is not None
    facts: dict[str, float | str] = {"validation_bits_per_token": bits, "best_step": leader.step}
    if config.sample_tokens:
        facts["sample"] = sample_text(training.weights, config, source.vocab, valid)
    if training.finished:
        training.final = leader.bits_per_token
        if limit is not None and limit < len(valid) - 1:
            with best_weights(training, writer):
                training.final = score(None)
        facts["final_validation_bits_per_token"] = training.final
    line = f"step {training.step:,} of {config.steps:,}: validation {bits:.4f} bits/token"
    if len(training.validations) == 1:
        line += f" ({config.evaluation})"
    if training.final is not None and training.final != leader.bits_per_token:
        line += f"; step {leader.step} on the whole held-out text: {training.final:.4f}"
    if out_of_patience(training.validations, config.patience):
        line += f"; no better than step {leader.step} for {config.patience} validations, so training ends"
    report.validation(facts, line)
    return training.is_best
