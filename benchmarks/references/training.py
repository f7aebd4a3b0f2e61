"""Trains and scores a reference in a process of its own: `python -m benchmarks.references.training JOB OUT`.

JOB is a JSON file with the project, its folder, and the configuration of the model that it is compared with.
The lanes of the text, the optimiser, its schedule and the clipping of gradients are this project's own.
`reference_step` trains in this process instead, in turns with this project's own steps, so that both are
timed alike.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.references.model import PROJECTS, ReferenceModel, ReferenceSession
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.records import from_json, to_json
from runtimes.tasks.evaluate import evaluate
from trainer.run.config import TrainConfig
from trainer.training.optimizer import make_optimizer, set_rate_and_clip
from trainer.training.schedule import first_token, learning_rate
from trainer.training.state import Training

POINTS = 20  # of the curve of the training loss


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What training came to."""

    parameters: int
    #: Of all threads, for the steps alone.
    cpu_seconds: float
    #: Bits per token of the test text under the rule of training.
    own: float
    #: The mean training loss in bits of each 20th part of the steps.
    curve: tuple[float, ...]
    #: In tokens, where spans are learned.
    mean_span: float | None = None


REFERENCE_HELP = (
    "A folder with the public code of Transformer-XL or adaptive-span, which is trained too; may be repeated."
)


def code_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The folder with the modules of each reference; raises ConfigError for a folder that has none."""
    found: dict[str, Path] = {}
    for folder in folders:
        places = [folder, folder / "pytorch"]
        here = {
            project: at.resolve()
            for project, model in PROJECTS.items()
            for at in places
            if (at / model.marker).is_file()
        }
        if not here:
            markers = " or ".join(model.marker for model in PROJECTS.values())
            raise ConfigError(
                f"{folder} has no {markers}; give the folder of a checkout, whose address is in "
                "`benchmarks/references/__init__.py`."
            )
        found |= here
    return found


def train_reference(
    project: str, folder: Path, config: TrainConfig, tokens: np.ndarray, test: np.ndarray, *, lanes: int
) -> Outcome:
    """The outcome of a new process, in which the public code trains on the lanes [B, N] and scores `test`.

    Raises ArtefactError where the process fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        job = Path(temporary) / "job.json"
        out = Path(temporary) / "outcome.json"
        np.save(Path(temporary) / "tokens.npy", tokens)
        np.save(Path(temporary) / "test.npy", test)
        facts = {"project": project, "folder": str(folder), "config": to_json(config), "lanes": lanes}
        job.write_text(json.dumps(facts), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.references.training", str(job), str(out)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        if done.returncode or not out.is_file():
            lines = done.stderr.strip().splitlines()
            raise ArtefactError(
                f"the public code of {project} failed ({lines[-1] if lines else done.returncode}); "
                "run without it by leaving out the option that names its folder."
            )
        return from_json(Outcome, json.loads(out.read_text(encoding="utf-8")), where=str(out))


def run_job(job: Path) -> Outcome:
    """Trains and scores here, in this process."""
    facts: dict[str, Any] = json.loads(job.read_text(encoding="utf-8"))
    config = TrainConfig.from_json(facts["config"], where=str(job))
    torch.set_num_threads(config.threads or torch.get_num_threads())
    torch.manual_seed(config.seed)
    model = PROJECTS[facts["project"]](Path(facts["folder"]), config.model, config.training)
    tokens, test = (np.load(job.parent / f"{name}.npy") for name in ("tokens", "test"))
    curve, seconds = train_steps(model, config, tokens)
    score = evaluate(ReferenceSession(model), test, lanes=facts["lanes"])  # type: ignore[arg-type]
    return Outcome(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cpu_seconds=seconds,
        own=score.bits_per_token,
        curve=curve,
        mean_span=model.mean_span(),
    )


class ReferenceTraining:
    """A reference that trains step by step on lanes [B, N], with this project's optimiser and schedule.

    A step reads the next segment of every lane. At the end of the lanes the streams start again with empty
    memory, and at the token at which this project's training begins that pass.
    """

    def __init__(self, model: ReferenceModel, config: TrainConfig, tokens_BN: np.ndarray) -> None:
        self.model = model
        self.config = config
        self.tokens_BN = tokens_BN
        self.optimizer = make_optimizer(config, model.train())
        self.memory = model.empty(config.batch)
        self.number = self.at = self.epoch = 0

    def step(self) -> float:
        """The mean loss of one step in nats, before the step."""
        model = self.model
        config = self.config
        T = self.config.training.segment
        if self.at + T >= self.tokens_BN.shape[1]:
            self.memory = model.empty(config.batch)
            self.epoch = self.epoch + 1
            self.at = first_token(config, self.epoch, length=self.tokens_BN.shape[1], segment=T)
        piece = torch.from_numpy(self.tokens_BN[:, self.at : self.at + T + 1].astype(np.int64))
        nats, self.memory = model.losses(piece[:, :-1].contiguous(), piece[:, 1:].contiguous(), self.memory)
        self.optimizer.zero_grad()
        objective: torch.Tensor = nats.mean() + model.penalty()
        objective.backward()  # type: ignore[no-untyped-call]
        set_rate_and_clip(self.optimizer, learning_rate(config, self.number), config.optimizer.clip)
        self.optimizer.step()
        model.constrain()
        self.number = self.number + 1
        self.at = self.at + T
        return float(nats.detach().mean())


def train_steps(
    model: ReferenceModel, config: TrainConfig, tokens_BN: np.ndarray
) -> tuple[tuple[float, ...], float]:
    """Trains for the steps of the configuration; returns the loss curve in bits, and CPU seconds."""
    training = ReferenceTraining(model, config, tokens_BN)
    began = time.process_time()
    losses = np.array([training.step() for _ in range(config.steps)])
    return in_parts(losses), time.process_time() - began


def in_parts(losses: np.ndarray) -> tuple[float, ...]:
    """The mean in bits of each of at most 20 parts of losses in nats."""
    parts = np.array_split(losses, min(POINTS, len(losses)))
    return tuple(round(float(part.mean()) / math.log(2), 4) for part in parts)


def reference_step(
    project: str, folder: Path, training: Training, tokens_BN: np.ndarray
) -> Callable[[], float]:
    """A function that trains one step of the code in `folder` and returns its loss in nats.

    It begins with the weights of `training`, and reads the same lanes [B, N] with the same optimiser.
    """
    config = training.config
    path = list(sys.path)
    try:
        model = PROJECTS[project](folder, config.model, config.training)
    finally:
        sys.path[:] = path  # one of the projects has modules that are named as packages of this one
    model.copy_weights(training.model)
    return ReferenceTraining(model, config, tokens_BN).step


def main(arguments: Sequence[str]) -> None:
    """Writes the outcome of JOB to OUT."""
    job, out = map(Path, arguments)
    out.write_text(json.dumps(to_json(run_job(job))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
