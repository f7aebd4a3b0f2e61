"""`xl-export train --set KEY=VALUE` and `--show`: in one process and in several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import xl
from trainer.training import launch

CHANGES = ("--set", "optimizer.kind=adamw", "--set", "optimizer.weight_decay=0.1", "--set=model.d_model=16")


def test_a_configuration_is_printed_with_its_changes(tmp_path: Path) -> None:
    shown = xl("train", "--show", "tiny", *CHANGES, "--steps", 3)
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert (data["optimizer"]["kind"], data["model"]["d_model"], data["steps"]) == ("adamw", 16, 3)
    assert data["schedule"]["warmup_steps"] <= 3
    (tmp_path / "mine.json").write_text(shown.stdout)
    assert xl("train", "--show", tmp_path / "mine.json").stdout == shown.stdout


def test_every_process_is_given_what_was_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configurations: list[dict[str, Any]] = []

    def remember(command: list[str], processes: int) -> None:
        given = Path(command[command.index("--out") - 1])
        configurations.append(json.loads(given.read_text()))

    monkeypatch.setattr(launch, "launch", remember)
    done = xl("train", "tiny", *CHANGES, "--seed", 3, "--processes", 2, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    (given,) = configurations
    assert (given["optimizer"]["weight_decay"], given["seed"]) == (0.1, 3)
