"""Runs in tests: stopping them, and comparing them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from runtimes.base.files import write_json
from trainer.run.config import TrainConfig
from trainer.training.loop import train
from trainer.training.state import Training

TIMED = ("tokens_per_second", "mfu", "seconds")  # metrics that differ from one training to the next


def state(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(run / "training.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(run: Path, key: str) -> list[Any]:
    return [line[key] for line in lines_of(run) if key in line]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines_of(run)]


def assert_same_run(run: Path, other: Path) -> None:
    assert metrics(run) == metrics(other)
    (tensors, facts), (other_tensors, other_facts) = state(run), state(other)
    assert facts == other_facts
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name
    for name in ("model.safetensors", "vocab.json", "config.json", "valid.txt", "test.txt"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def longer(run: Path, steps: int) -> None:
    """Gives a run more steps than it was trained for."""
    write_json(run / "config.json", json.loads((run / "config.json").read_text()) | {"steps": steps})


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C just before the given step."""
    advance = Training.advance

    def stopping(training: Training, *arguments: Any) -> float:
        if training.step == step:
            raise KeyboardInterrupt
        return advance(training, *arguments)

    monkeypatch.setattr(Training, "advance", stopping)


def train_until(config: TrainConfig, out: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            train(config, out, progress=False)
