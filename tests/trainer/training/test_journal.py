"""metrics.jsonl and TensorBoard events: the same numbers, also after a run was resumed."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.errors import MissingPackageError
from trainer.run.config import TrainConfig
from trainer.training.journal import Journal
from trainer.training.loop import resume, train

Make = Callable[..., TrainConfig]


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_shows_the_metrics_of_a_run_that_was_stopped_and_resumed(
    make_config: Make, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from trainer.training.state import Training

    advance = Training.advance

    def stopping(training: Training, *arguments: Any) -> float:
        if training.step == 8:
            raise KeyboardInterrupt
        return advance(training, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "advance", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tensorboard=True, steps=12), tmp_path / "run", progress=False)
    run = resume(tmp_path / "run", progress=False)
    shown = events(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss_nats", "bits_per_token", "learning_rate", "validation_bits_per_token", "best_step"):
        logged = [(line["step"], line[key]) for line in lines if key in line]
        assert [step for step, _ in shown[key]] == [step for step, _ in logged], key
        assert [value for _, value in shown[key]] == pytest.approx([value for _, value in logged]), key


def test_tensorboard_is_asked_for(make_config: Make, tmp_path: Path) -> None:
    assert not (train(make_config(steps=1), tmp_path / "run", progress=False) / "tensorboard").exists()


def test_a_missing_tensorboard_is_one_sentence_before_anything_is_written(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def lacking(name: str, *arguments: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(MissingPackageError, match=r"tensorboard is not installed.*xl-export\[tensorboard\]"):
        train(make_config(tensorboard=True), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 4, "a": 1}\n[]\n{"step": 5, "a": 2}\n{"step": 6, "a": 3}\n{"step": 5, "a"'
    )
    Journal(tmp_path, step=5, tensorboard=False).write(6, a=4)
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 4, "a": 1}\n{"step": 5, "a": 2}\n{"step": 6, "a": 4}\n'
