"""The record of a run: `metrics.jsonl`, and on request the same for TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError, first_line, needs
from runtimes.base.files import atomic_file, read_bytes, writing
from runtimes.base.records import finite_or_null, json_text, to_json
from trainer.run.checkpoint import TENSORBOARD, WANDB
from trainer.run.config import TrainConfig
from trainer.run.history import METRICS, read_metrics, values_of

PROJECT = "xl-export"  # of Weights & Biases, unless WANDB_PROJECT names another


class Journal:
    """Appends to the record of `run`.

    step: the step of the checkpoint from which training continues. Lines of later steps are removed.
    seconds: of training that the record had at that step.
    """

    def __init__(self, run: Path, config: TrainConfig, *, step: int) -> None:
        self.path = run / METRICS
        self.seconds = _trim(self.path, step)
        self.events = (
            _summary_writer()(run / TENSORBOARD, purge_step=step + 1) if config.tensorboard else None
        )
        self.wandb = _wandb_run(run, config) if config.wandb else None

    def write(self, step: int, **facts: Any) -> None:
        """Appends one line with these facts, which are sent to the others too.

        A number that is not finite, such as a gradient norm that fp16 skipped, is written as null.
        """
        facts = finite_or_null(facts)
        with writing(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json_text({"step": step, **facts}) + "\n")
        if self.events is not None:
            for name, value in facts.items():
                if isinstance(value, str):
                    self.events.add_text(name, f"```\n{value}\n```", step)
                elif value is not None:
                    self.events.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log({name: value for name, value in facts.items() if value is not None}, step=step)

    def close(self) -> None:
        """Writes the last events."""
        if self.events is not None:
            self.events.close()
        if self.wandb is not None:
            self.wandb.finish()


def check_packages(config: TrainConfig) -> None:
    """Raises MissingPackageError if TensorBoard or Weights & Biases is wanted and not installed."""
    if config.tensorboard:
        _summary_writer()
    if config.wandb:
        _wandb()


def _summary_writer() -> Any:
    with needs("tensorboard", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


def _wandb() -> Any:
    with needs("wandb", "wandb"):
        import wandb
    return wandb


def _wandb_run(run: Path, config: TrainConfig) -> Any:
    """A run of Weights & Biases; the same one again where a training is resumed.

    Its identity is kept in the run's folder. The mode (WANDB_MODE) and the account are the library's own
    settings.
    """
    identity = run / WANDB / "id"
    if not identity.is_file():
        with writing(identity):
            identity.parent.mkdir(exist_ok=True)
        with atomic_file(identity) as temporary:
            temporary.write_text(uuid.uuid4().hex, encoding="utf-8")
    wandb = _wandb()
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.resolve().name,
            id=read_bytes(identity).decode("utf-8", errors="replace").strip(),
            dir=str(run),
            config=to_json(config),
            resume="allow",
        )
    except Exception as error:  # of many kinds: no account, no network, a proxy
        raise UserError(
            f"Weights & Biases could not be started ({first_line(error)}); run `wandb login` or set "
            f"WANDB_MODE=offline, and continue with `xl-export train --resume {run}`."
        ) from error


def _trim(path: Path, step: int) -> float:
    """Removes the lines that were written after the checkpoint; returns the seconds of training before."""
    read = read_metrics(path) if path.is_file() else []
    lines = [finite_or_null(line) for line in read if line["step"] <= step]
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json_text(line) + "\n" for line in lines), encoding="utf-8")
    seconds = values_of(lines, "seconds")
    return seconds[-1][1] if seconds else 0.0
