"""The training loop: what it reads, computes, validates and writes. Resuming is in `test_resume.py`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from tests.trainer.training.runs import state, values
from trainer.model.model import LanguageModel
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training.loop import train
from trainer.training.schedule import learning_rate
from trainer.training.state import Training

Make = Callable[..., TrainConfig]
Started = Callable[[TrainConfig], tuple[Training, np.ndarray]]
GOLDEN = Path(__file__).with_name("golden_losses.json")


def test_golden_losses_of_twenty_steps(make_config: Make, tmp_path: Path) -> None:
    """A refactoring leaves every loss as it was. After a change that is meant to alter them, write them anew
    with

    REGENERATE=1 .venv/bin/python -m pytest tests/trainer/training/test_loop.py -k golden
    """
    losses = values(train(make_config(steps=20), tmp_path / "run", progress=False), "loss_nats")
    if os.environ.get("REGENERATE"):
        GOLDEN.write_text(json.dumps([round(value, 6) for value in losses], indent=1) + "\n")
    assert len(losses) == 20
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), abs=1e-4)


def test_the_seed_decides_the_run(make_config: Make, tmp_path: Path) -> None:
    runs = [
        train(make_config(steps=3, seed=seed, dropout=0.2), tmp_path / str(i), progress=False)
        for i, seed in enumerate((5, 5, 6))
    ]
    first, again, other = ((run / "model.safetensors").read_bytes() for run in runs)
    assert first == again != other


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
def test_a_new_pass_sees_no_old_memory(make_config: Make, started: Started, initial_memory: str) -> None:
    rule = MemoryRule(mem_len=8, segment=8, initial_memory=initial_memory)
    losses = []
    for garbage in (0.0, 1e3):
        training, tokens_BN = started(make_config(batch=90, training=rule))
        for _ in range(4):
            training.advance(tokens_BN)
        training.memories = [[tensor + garbage for tensor in memory] for memory in training.memories]
        losses.append([float(training.advance(tokens_BN).nats) for _ in range(2)])
    assert losses[0] == losses[1]


def test_the_scheduled_rate_is_the_one_applied_and_logged(
    make_config: Make, started: Started, tmp_path: Path
) -> None:
    config = make_config(steps=4, warmup_steps=2, lr=0.01)
    training, tokens_BN = started(config)
    before = training.model.vocabulary.output_bias["0"].detach().clone()
    training.advance(tokens_BN)
    moved = (training.model.vocabulary.output_bias["0"] - before).abs().max().item()
    assert moved == pytest.approx(0.005, rel=0.01)  # Adam's first step moves by the rate itself
    logged = values(train(config, tmp_path / "run", progress=False), "learning_rate")
    assert logged == [learning_rate(config, step) for step in range(4)]


def test_validation_leaves_training_as_it_was(make_config: Make, tmp_path: Path) -> None:
    """Neither the mode of the model, nor its memory, nor the random state of dropout. Samples included."""
    often, never = (
        train(
            make_config(steps=6, validate_every=every, sample_tokens=5, dropout=0.3),
            tmp_path / str(every),
            progress=False,
        )
        for every in (1, 999)
    )
    assert len(values(often, "sample")) == 6
    assert values(often, "loss_nats") == values(never, "loss_nats")
    assert (often / "model.safetensors").read_bytes() == (never / "model.safetensors").read_bytes()


def test_an_infinite_gradient_is_never_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step is finite and its gradient is not; nothing is read until a checkpoint is due."""
    start = Training.start

    def broken(*arguments: Any, **options: Any) -> Training:
        training = start(*arguments, **options)
        calls: list[int] = []

        def third(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * math.inf if len(calls) == 3 else gradient

        training.model.vocabulary.output_bias["0"].register_hook(third)
        return training

    monkeypatch.setattr(Training, "start", broken)
    config = make_config(steps=20, log_every=999, validate_every=999, checkpoint_every=2)
    with pytest.raises(UserError, match=r"norm of the gradient became (nan|inf) at step 3"):
        train(config, tmp_path / "run", progress=False)
    tensors, facts = state(tmp_path / "run")
    assert facts["step"] == 2
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("checkpoint_every", [5, 999])
def test_weights_that_are_not_finite_are_never_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    """Neither at a checkpoint nor after the last step: the loss of that step was finite, and the next one
    comes too late.
    """
    steps, constrain = [], LanguageModel.constrain

    def breaking(model: LanguageModel) -> None:
        constrain(model)
        steps.append(len(steps) + 1)
        if len(steps) == 10:
            model.blocks[1].query.weight.data[0, 0] = math.nan

    monkeypatch.setattr(LanguageModel, "constrain", breaking)
    config = make_config(steps=10, validate_every=999, checkpoint_every=checkpoint_every)
    monkeypatch.setattr("trainer.training.loop._validate", lambda *_, **__: False)
    with pytest.raises(
        UserError, match=r"model\.blocks\.1\.query\.weight became nan at step 10; the last checkpoint is kept"
    ):
        train(config, tmp_path / "run", progress=False)
    tensors, facts = state(tmp_path / "run")
    assert facts["step"] == (5 if checkpoint_every == 5 else 0)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(parameter.isfinite().all() for parameter in load_run(tmp_path / "run").model.parameters())
