"""Checkpoints are written while training goes on; rates do not count that time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.training.snapshot as snapshot
from runtimes.base.errors import UserError
from tests.trainer.training.runs import assert_same_run, metrics, state
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training.loop import resume, train
from trainer.training.reporting.report import Pace
from trainer.training.state import Training

Make = Callable[..., TrainConfig]


def test_training_goes_on_while_a_checkpoint_is_written(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 5 is written only when step 8 is done; the run is stopped there."""
    config = make_config(validate_every=5)
    whole = train(config, tmp_path / "whole", progress=False)
    save, advance, went_on, seen = snapshot.save_tensors, Training.advance, threading.Event(), []

    def waiting(path: Path, *arguments: Any) -> None:
        seen.append(path.name)
        if len(seen) == 3:
            assert went_on.wait(60), "training waited for the checkpoint"
        save(path, *arguments)

    def stepping(training: Training, *arguments: Any) -> Any:
        if training.step == 8:
            went_on.set()
            raise KeyboardInterrupt
        return advance(training, *arguments)

    monkeypatch.setattr(snapshot, "save_tensors", waiting)
    monkeypatch.setattr(Training, "advance", stepping)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert seen == ["training.safetensors", "model.safetensors"] * 2, "the state comes first"
    assert state(tmp_path / "run")[1]["step"] == 5, "what was being written was finished"
    assert_same_run(resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("number", [2, 5])  # a checkpoint on the way, and the last one
def test_a_checkpoint_that_cannot_be_written_ends_training(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save, states = snapshot.save_tensors, []

    def full(path: Path, *arguments: Any) -> None:
        states.append(path.name)
        if states.count("training.safetensors") == number:
            raise UserError(f"{path} could not be written: no space left; nothing was changed there.")
        save(path, *arguments)

    monkeypatch.setattr(snapshot, "save_tensors", full)
    with pytest.raises(UserError, match=r"training\.safetensors could not be written: no space left"):
        train(make_config(), tmp_path / "run", progress=False)
    assert state(tmp_path / "run")[1]["step"] == (number - 2) * 5
    assert max(line["step"] for line in metrics(tmp_path / "run")) <= (number - 1) * 5 + 5
    load_run(tmp_path / "run")


def test_the_rate_counts_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pace = Pace()
    pace.add(50)
    now[0] += 2
    with pace.paused():
        now[0] += 1000
    pace.add(150)
    now[0] += 2
    assert pace.tokens_per_second == 50
    assert pace.report() == 50
    pace.add(30)
    now[0] += 1
    assert pace.report() == 30
