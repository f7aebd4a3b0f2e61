"""What validation decides in a run: the best weights, the learning rate, the end; and that the last good
checkpoint is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer.training.loop as loop
from runtimes.base.errors import ConfigError
from runtimes.tasks.evaluate import evaluate
from tests.trainer.training.runs import values
from trainer.run.checkpoint import load_run
from trainer.run.config import Averaging, TrainConfig
from trainer.run.history import read_header
from trainer.run.session import TorchSession
from trainer.training.loop import train
from trainer.training.validation import validate

Make = Callable[..., TrainConfig]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`scores(4, 3, …)`: bits per token that the validations of a run then find."""

    def pretend(*bits: float) -> None:
        remaining: Iterator[float] = iter(bits)

        monkeypatch.setattr(loop, "validate", lambda *_, **__: next(remaining))

    return pretend


def weights_after(make_config: Make, folder: Path, step: int, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights that a run with another number of validations has after a step; with dropout 0 these change
    nothing.
    """
    train(make_config(steps=step, schedule="constant", validate_every=999, **changes), folder, progress=False)
    return load_file(folder / "model.safetensors")


def step_of(run: Path) -> str:
    """The step of the weights for export."""
    return str(read_header(run / "model.safetensors")["__metadata__"]["step"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_best_weights_are_finally_scored_on_all_text(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are older than the last ones, which training still has after that score."""
    best = weights_after(make_config, tmp_path / "best", 8)
    last = weights_after(make_config, tmp_path / "last", 20)
    remaining, limits = iter((5.0, 4.0, 4.5, 4.25, 6.0)), []

    def scored(*arguments: Any, limit: int | None, **options: Any) -> float:
        limits.append(limit)
        return next(remaining) if limit else validate(*arguments, limit=limit, **options)

    monkeypatch.setattr(loop, "validate", scored)
    config = make_config(schedule="constant", validate_every=4, validate_tokens=50)
    run = train(config, tmp_path / "run", progress=False)
    assert limits == [50] * 5 + [None]
    assert values(run, "best_step") == [4, 8, 8, 8, 8]
    assert step_of(run) == "8"
    assert same(dict(load_run(run).model.state_dict()), best)
    session = TorchSession.open(run)
    tokens = session.vocab.encode((run / "valid.txt").read_bytes())
    expected = evaluate(session, tokens, lanes=4).bits_per_token
    assert values(run, "final_validation_bits_per_token") == [pytest.approx(expected, abs=1e-5)]
    described = TorchSession.describe(run)["training"]
    assert described["final_validation_bits_per_token"] == pytest.approx(expected, abs=1e-5)
    state = load_file(run / "training.safetensors")
    assert same({f"model.{name}": tensor for name, tensor in last.items()}, state)


def test_training_ends_when_patience_does(
    make_config: Make, tmp_path: Path, scores: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    scores(5, 4, 4.5, 4.25, 3)
    run = train(make_config(schedule="constant", validate_every=2, patience=2), tmp_path / "run")
    assert values(run, "step")[-1] == 8
    assert step_of(run) == "4"
    assert "no better than step 4 for 2 validations, so training ends" in capsys.readouterr().out
    loop.resume(run)
    assert "finished already, at step 8 of 20" in capsys.readouterr().out


def test_a_plateau_lowers_the_rate(make_config: Make, tmp_path: Path, scores: Callable[..., None]) -> None:
    scores(5, 4, 4.5, 4.25, 3)
    recipe = {
        "schedule": "plateau",
        "warmup_steps": 0,
        "plateau_patience": 1,
        "plateau_decay": 0.25,
        "lr": 0.01,
    }
    run = train(make_config(steps=10, validate_every=2, **recipe), tmp_path / "run", progress=False)
    assert values(run, "learning_rate") == pytest.approx([0.01] * 8 + [0.0025] * 2)


def test_the_average_is_validated_and_exported(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        loop, "validate", lambda model, *rest, **more: (seen.append(model), validate(model, *rest, **more))[1]
    )
    config = make_config(averaging=Averaging(start_step=12), schedule="constant")
    run = train(config, tmp_path / "run", progress=False)
    state, model = load_file(run / "training.safetensors"), load_file(run / "model.safetensors")
    assert not same(model, {name: state[f"model.{name}"] for name in model})
    assert same(model, {name: state[f"average.{name}"] for name in model})
    assert same(model, seen[1].state_dict())
    assert values(run, "best_step") == [10, 20]


def test_too_little_held_out_text_is_noted_once(
    make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 300 + "x" * 200)  # words: the held-out 5 % are one of them
    config = make_config(text=str(text), vocab="word", batch=2, steps=6)
    run = train(config, tmp_path / "run")
    output = capsys.readouterr().out
    assert output.count("too few to validate: model.safetensors will be the last checkpoint") == 1
    assert values(run, "validation_bits_per_token") == []
    assert step_of(run) == "6"
    with pytest.raises(ConfigError, match="the held-out text has fewer than 2 tokens, and schedule plateau"):
        train(dataclasses.replace(config, patience=1), tmp_path / "other", progress=False)
    assert not (tmp_path / "other").exists()
