"""`xl-export train`: text to run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from xl_export.cli.options import PACKAGES, force_option


@click.command("train")
@click.argument("config", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="The run folder to write.")
@click.option(
    "--resume",
    "resume_run",
    type=click.Path(path_type=Path),
    help="Continue this run instead of starting one.",
)
@click.option("--list", "list_", is_flag=True, help="Print the built-in configurations and end.")
@click.option(
    "--text", type=click.Path(path_type=Path), help="A UTF-8 text; the built-in English corpus by default."
)
@click.option(
    "--data", "data_", type=click.Path(path_type=Path), help="A dataset that `xl-export prepare` prepared."
)
@click.option("--vocab", type=click.Choice(["byte", "char", "word"]), help="What a token is.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps.")
@click.option("--seed", type=click.IntRange(min=0), help="Random seed.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What trains.")
@click.option(
    "--tensorboard/--no-tensorboard",
    default=None,
    help="Metrics also as TensorBoard events, in RUN/tensorboard.",
)
@force_option
def train_command(
    config: str | None, out: Path | None, resume_run: Path | None, list_: bool, force: bool, **changes: Any
) -> None:
    """Train a model, or continue training one.

    CONFIG is a JSON file, or the name of a built-in configuration: `demo` by default; `--list` shows all. Options
    replace what the configuration says. The run folder holds model.safetensors (the best weights by validation),
    config.json, vocab.json, metrics.jsonl and the held-out texts. A run that was stopped continues with --resume, bit
    for bit as if it had not been. Several processes: torchrun --nproc-per-node 2 -m xl_export train …
    """
    if list_:
        with needs("train", *PACKAGES):
            from trainer.run.catalogue import catalogue
        click.echo("\n".join(catalogue()))
        return
    changes["data"] = changes.pop("data_")
    changes = {
        key: str(value) if key in ("text", "data") else value
        for key, value in changes.items()
        if value is not None
    }
    if (out is None) == (resume_run is None):
        raise UserError("give either --out RUN to start a run, or --resume RUN to continue one.")
    if resume_run and (config or force):
        raise UserError(
            "--resume continues a run as it was configured; leave out CONFIG and --force, or start a new run."
        )
    if resume_run and changes:
        raise UserError(
            f"--resume continues a run as it was configured; leave out --{next(iter(changes))}, or start a new run."
        )
    with needs("train", *PACKAGES):
        from trainer.run.config import TrainConfig
        from trainer.training.loop import resume
        from trainer.training.loop import train as start
    if resume_run:
        run = _interruptible(lambda: resume(resume_run), resume_run)
    else:
        assert out is not None
        settings = TrainConfig.load(config or "demo")
        settings = dataclasses.replace(settings.with_steps(changes.pop("steps", settings.steps)), **changes)
        run = _interruptible(lambda: start(settings, out, force=force), out)
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun speaks for all
        click.echo(f"{run} is trained; next: xl-export export {run} --out artefact")


def _interruptible(work: Callable[[], Path], run: Path) -> Path:
    try:
        return work()
    except KeyboardInterrupt:
        kept = f"the last checkpoint is kept: continue with `xl-export train --resume {run}`"
        click.echo(f"\nstopped; {kept if run.is_dir() else 'nothing was written'}", err=True)
        raise SystemExit(130) from None
