"""metrics.jsonl and TensorBoard events: the same numbers, also after a run was resumed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.errors import MissingPackageError, UserError
from tests.trainer.training.runs import lines_of, train_until
from trainer.run.config import TrainConfig
from trainer.training.loop import resume, train
from trainer.training.reporting.journal import PROJECT, Journal

Make = Callable[..., TrainConfig]


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_shows_the_metrics_of_a_resumed_run(make_config: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train_until(make_config(tensorboard=True, steps=12), tmp_path / "run", 8)
    run = resume(tmp_path / "run", progress=False)
    shown = events(run)
    lines = lines_of(run)
    for key in ("loss_nats", "bits_per_token", "learning_rate", "validation_bits_per_token", "best_step"):
        logged = [(line["step"], line[key]) for line in lines if key in line]
        assert [step for step, _ in shown[key]] == [step for step, _ in logged], key
        assert [value for _, value in shown[key]] == pytest.approx([value for _, value in logged]), key


def test_a_missing_library_is_one_sentence_before_anything_is_written(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=r"wandb is not installed.* 'wandb>="):
        train(make_config(wandb=True), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


class StubRun:
    """What is sent to Weights & Biases. `log` and `finish` have the parameters of the library's class Run."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.lines.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1


def test_weights_and_biases_sees_one_run_after_a_resume(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    stub = StubRun()

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: list[str] | None = None,
        config: dict[str, Any] | None = None,
        *,
        resume: str | None = None,
    ) -> StubRun:  # the parameters of wandb.init 0.31 that come first, and `resume`
        calls.append(
            {"project": project, "dir": dir, "id": id, "name": name, "config": config, "resume": resume}
        )
        return stub

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = make_config(wandb=True, steps=6, validate_every=3, checkpoint_every=3, sample_tokens=2)
    train_until(config, tmp_path / "run", 4)
    resume(tmp_path / "run", progress=False)
    first, second = calls
    assert first == second, "the same identity, or two runs would be shown"
    assert (first["project"], first["name"], first["resume"]) == (PROJECT, "run", "allow")
    assert first["config"]["optimizer"]["lr"] == 0.01
    assert len(first["id"]) == 32
    assert Path(first["dir"]) == tmp_path / "run"
    assert stub.finished == 2
    sent = [(step, name, value) for step, data in stub.lines for name, value in data.items()]
    lines = lines_of(tmp_path / "run")
    assert {(line["step"], key, line[key]) for line in lines for key in line if key != "step"} <= set(sent)
    assert {"sample", "mfu", "gradient_norm", "validation_bits_per_token"} <= {name for _, name, _ in sent}


def test_an_error_of_weights_and_biases_leaves_a_resumable_run(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured\nwandb login")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(UserError, match=r"could not be started \(api_key not configured\).*--resume"):
        train(make_config(wandb=True, steps=3), tmp_path / "run", progress=False)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: StubRun()))
    assert resume(tmp_path / "run", progress=False).is_dir()


def test_the_record_is_json_whatever_is_written_or_was_there(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "seconds": 2.5}\n{"step": 1, "seconds": Infinity}\n{"step": 1, "seconds": 1%s}\n'
        % ("0" * 400)
    )
    journal = Journal(tmp_path, make_config(), step=2)
    assert journal.seconds == 2.5
    assert lines_of(tmp_path)[1] == {"step": 1, "seconds": None}
    journal.write(3, gradient_norm=float("inf"), loss_nats=1.0)
    assert lines_of(tmp_path)[-1] == {"step": 3, "gradient_norm": None, "loss_nats": 1.0}
