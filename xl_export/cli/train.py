"""`xl-export train`: from a text or a dataset to a run."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.files import write_json
from runtimes.base.ranges import Range
from runtimes.base.records import json_text, to_json
from runtimes.base.startup import prepare_training
from runtimes.cli.group import LongCommand
from runtimes.cli.options import Number, json_option, options_of, show, text_as_progress, warn_of_too_many
from trainer.run.config import TrainConfig, built_in
from xl_export.cli.options import PACKAGES, force_option

PATH = click.Path(path_type=Path)
PLANNED_MINUTES = 20.0  # of a run that is planned
MOVABLE = ("steps", "device", "text", "data")  # what --resume may change
# A launched process starts like this. Python puts the working folder first on the module path, where a file
# of the user may have the name of one of our packages; it is removed, and the folder that holds these
# packages is added instead. Until the command is ready to clean up after Ctrl-C, Ctrl-C ends the process
# without a traceback.
LAUNCHED = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); sys.path[:] = [p for p in sys.path "
    "if p]; sys.path.append(sys.argv.pop(1)); from xl_export.cli.main import main; "
    "main(prog_name='xl-export')"
)


@click.command(
    "train",
    cls=LongCommand,
    sections={
        "Main options": "--out --text --minutes --from --data --steps --resume --force",
        "Vocabulary of a text": "--vocab --min-count --max-size",
        "Configuration": "--list --show --set --seed",
        "Machine": "--device --processes",
        "Reports": "--tensorboard --wandb --json",
    },
)
@click.argument("config", required=False)
@click.option("--out", type=PATH, help="The folder in which the new run is written.")
@click.option(
    "--resume",
    "resume_run",
    type=PATH,
    help="Continue this run instead of starting a new one. With a larger --steps, a finished run trains on.",
)
@click.option("--list", "list_", is_flag=True, help="Print the built-in configurations and stop.")
@click.option(
    "--show", metavar="CONFIG", help="Print this configuration as JSON, with all changes, and stop."
)
@click.option(
    "--set",
    "set_",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change any key of the configuration, such as model.d_model=512 or optimizer.lr=3e-4. The value is "
    "JSON, or text without quotes. Can be given several times.",
)
@options_of(TrainConfig, defaults=False, text=PATH, data=PATH)
@click.option(
    "--minutes",
    type=Number(Range(0.1, 1e6)),
    help="Without CONFIG: choose size and steps for about this time, at the speed of this machine now. If "
    "it becomes slower, the schedule is shortened to fit.  [default: 20]",
)
@click.option(
    "--from",
    "from_run",
    type=PATH,
    help="Fine-tune: start from the best weights of this run, trained or imported, with its vocabulary and "
    "model sizes, on another --text or --data.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Train in this many processes on this machine. Each process has an equal share of the lanes, "
    "and either one GPU or an equal share of the CPU threads.",
)
@force_option
@json_option
def train_command(
    config: str | None,
    out: Path | None,
    resume_run: Path | None,
    list_: bool,
    show: str | None,
    set_: tuple[str, ...],
    processes: int | None,
    force: bool,
    minutes: float | None,
    from_run: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Train a model, continue to train one, or fine-tune one.

    With --text or --data and without CONFIG, the size of the model and the number of steps are chosen from
    the amount of text and the --minutes; for a --text, the vocabulary is chosen too. CONFIG is a JSON file or
    the name of a built-in configuration (--list shows all of them, --show NAME prints one). Options replace
    what the configuration says. Without CONFIG, --text, --data and --from, `demo` is trained on a built-in
    text.

    The run is a folder with model.safetensors (the weights of the best validation), config.json, vocab.json,
    metrics.jsonl and the held-out texts. A run that was stopped continues with --resume. It then ends with
    the same bits as a run that was never stopped.
    """
    if list_:
        _list(as_json)
        return
    changes = {
        name: str(value) if name in ("text", "data") else value
        for name, value in changes.items()
        if value is not None
    }
    if show is not None:
        _refuse_two_vocabularies(changes)
        with needs("train", *PACKAGES):
            click.echo(json_text(to_json(_changed(TrainConfig.load(show), set_, changes)), indent=2))
        return
    _refuse_contradictions(config, out, resume_run, force, changes | ({"set": set_} if set_ else {}))
    _refuse_two_vocabularies(changes)
    wants_plan = from_run is not None or "text" in changes or "data" in changes
    plans = wants_plan and config is None and resume_run is None
    _refuse_unplannable(plans, from_run, minutes, processes, changes)
    prepare_training()  # before PyTorch loads
    with needs("train", *PACKAGES):
        from trainer.training.launch import launch, reporting
        from trainer.training.loop import config_of, resume, train
    run = resume_run or out
    assert run is not None
    time_planned: float | None = None
    with reporting(), _interruptible(run):
        with text_as_progress(as_json):
            if resume_run:
                settings = config_of(resume_run, **changes)
            elif plans:
                planned = _planned(run, force, from_run, minutes or PLANNED_MINUTES, changes)
                settings = _changed(planned, set_, changes)
                if "steps" not in changes and settings.steps == planned.steps:
                    time_planned = minutes or PLANNED_MINUTES
            else:
                settings = _changed(TrainConfig.load(config or "demo"), set_, changes)
            _check_processes(settings, processes)
        if processes not in (None, 1):
            with tempfile.TemporaryDirectory(prefix="xl-export-") as folder:
                words = [*(["--force"] * force), *(["--json"] * as_json)]
                if resume_run:
                    words += ["--resume", str(resume_run)]
                    changes["steps"] = settings.steps
                    words += [f"--{name}={value}" for name, value in changes.items()]
                else:
                    write_json(Path(folder) / "config.json", to_json(settings))
                    words += [f"{folder}/config.json", "--out", str(out)]
                root = str(Path(__file__).parents[2])
                launch([sys.executable, "-c", LAUNCHED, root, "train", *words], processes)
            return  # the first of the processes has printed what comes next
        with text_as_progress(as_json):
            if resume_run:
                resume(resume_run, **changes)
            else:
                train(settings, run, force=force, minutes=time_planned)
    if _is_first():
        _conclude(run, as_json)


def _list(as_json: bool) -> None:
    with needs("train", *PACKAGES):
        from trainer.run.catalogue import catalogue
    show({"configurations": sorted(built_in())}, catalogue(), as_json=as_json)


def _refuse_contradictions(
    config: str | None, out: Path | None, resume_run: Path | None, force: bool, changes: dict[str, Any]
) -> None:
    if (out is None) == (resume_run is None):
        raise UserError("give either --out RUN to start a run, or --resume RUN to continue one.")
    if resume_run and (config or force):
        raise UserError(
            "--resume continues a run as it was configured; leave out CONFIG and --force, or start a new run."
        )
    if resume_run and (other := [name for name in changes if name not in MOVABLE]):
        raise UserError(
            "--resume continues a run as it was configured, and only --steps, --device, --text and --data "
            f"may change; leave out --{_option(other[0])}, or start a new run."
        )


def _refuse_unplannable(
    plans: bool,
    from_run: Path | None,
    minutes: float | None,
    processes: int | None,
    changes: dict[str, Any],
) -> None:
    """Raises UserError for options that do not fit a configuration that is chosen here, or one that is not.

    plans: whether it is chosen here.
    """
    if not plans and (from_run is not None or minutes is not None):
        option = "--from" if from_run is not None else "--minutes"
        raise UserError(f"{option} is for a new run on --text or --data without CONFIG; leave out {option}.")
    if minutes is not None and "steps" in changes:
        raise UserError("--minutes decides the number of steps; leave out --minutes, or --steps.")
    if from_run is not None and not {"text", "data"} & set(changes):
        raise UserError("--from needs something to train on; give --text FILE, or --data DATASET.")
    if from_run is not None and {"vocab", "min_count", "max_size"} & set(changes):
        raise UserError(
            "--from uses the vocabulary of its run; leave out --vocab, --min-count and --max-size."
        )
    if plans and (processes not in (None, 1) or "WORLD_SIZE" in os.environ):
        raise UserError(
            "without CONFIG a run is planned for one process; leave out --processes, or give a CONFIG."
        )


def _planned(
    out: Path, force: bool, from_run: Path | None, minutes: float, changes: dict[str, Any]
) -> TrainConfig:
    """The configuration that is chosen for a text, a dataset or fine-tuning; prints a paragraph on it."""
    from trainer.training.loop import refuse_existing_run
    from trainer.training.plan import plan, plan_tuning

    sources = [Path(changes[name]) for name in ("text", "data") if name in changes]
    refuse_existing_run(out, force=force, sources=sources)  # before the speed is measured
    names = ("text", "data", "steps", "device", *(("vocab", "max_size") if "text" in changes else ()))
    given = {name: changes[name] for name in names if name in changes}
    if from_run is not None:
        config, paragraph = plan_tuning(from_run, minutes=minutes, **given)
    else:
        config, paragraph = plan(minutes=minutes, **given)
    click.echo(paragraph)
    return config


def _refuse_two_vocabularies(changes: dict[str, Any]) -> None:
    for name in ("vocab", "min_count", "max_size"):
        if "data" in changes and name in changes:
            raise UserError(
                f"--{_option(name)} is {changes[name]} and the dataset {changes['data']} has its own "
                f"vocabulary; leave out --{_option(name)}, or give a text file with --text."
            )


def _check_processes(settings: TrainConfig, processes: int | None) -> None:
    """Raises UserError if this number of processes cannot train the configuration; warns of too many."""
    from trainer.training.launch import REPORTS
    from trainer.training.parallel import Ranks

    if processes is not None and "WORLD_SIZE" in os.environ:
        raise UserError(
            "--processes was given to a process that torchrun had started (WORLD_SIZE is set); leave out "
            "--processes, or run xl-export without torchrun."
        )
    if processes is not None:
        Ranks(count=processes).lanes(settings.batch, settings.accumulate)
    if REPORTS not in os.environ and _is_first():  # otherwise the process that launched this one has warned
        warn_of_too_many(settings.threads * (processes or 1))


def _is_first() -> bool:
    """Whether this is the only process of the run, or the first of several, which speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _changed(settings: TrainConfig, assignments: tuple[str, ...], changes: dict[str, Any]) -> TrainConfig:
    """The configuration with the assignments of --set, and then of the other options."""
    from trainer.run.overrides import keys_of, with_overrides

    if twice := sorted(keys_of(assignments) & set(changes)):
        raise UserError(f"{twice[0]} is given by --set and by --{_option(twice[0])}; leave out one of them.")
    changes = dict(changes)
    if (steps := changes.pop("steps", None)) is not None:  # it moves other keys, but none that was given
        assignments = (f"steps={steps}", *assignments)
    settings = with_overrides(settings, assignments)
    if changes.get("vocab", settings.vocab) != settings.vocab:  # the limits are of another vocabulary
        changes = {"min_count": 1, "max_size": None, **changes}
    return dataclasses.replace(settings, **changes)


def _option(name: str) -> str:
    """The name of an option as people write it."""
    return name.replace("_", "-")


def _conclude(run: Path, as_json: bool) -> None:
    from trainer.run.history import history_of, read_config

    history = history_of(run, read_config(run))
    assert history is not None, "it was trained here"
    if history.concern:
        click.echo(f"Warning: {history.concern}", err=True)
    state = "has finished" if history.concern else "is trained"
    line = f"{run} {state}; next: xl-export export {run} --out artefact"
    show({"run": str(run), "concern": history.concern, **history.describe()}, [line], as_json=as_json)


@contextmanager
def _interruptible(run: Path) -> Iterator[None]:
    """If a signal ends the training, prints that the run can be resumed; keeps the signal's exit code."""
    from trainer.training.launch import REPORTS

    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else error.code
        is_signal = isinstance(code, int) and code > 128
        if not is_signal or REPORTS in os.environ or not _is_first():
            raise  # no signal, or another process says it
        kept = f"the last checkpoint is kept: continue with `xl-export train --resume {run}`"
        with suppress(OSError):  # the terminal was closed
            click.echo(f"\nstopped; {kept if run.is_dir() else 'nothing was written'}", err=True)
        raise SystemExit(code) from None
