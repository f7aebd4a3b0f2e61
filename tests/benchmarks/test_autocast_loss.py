"""Pairs of trainings in two precisions: what differs, what is kept, and how sure the mean is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.learning import autocast_loss
from benchmarks.cases.learning.autocast_loss import half_interval
from benchmarks.documents import table
from benchmarks.runs import History
from tests.benchmarks.shown import call, in_documents
from trainer.run.config import TrainConfig


def pair(seed: int, fp32: float, bf16: float) -> dict[str, Any]:
    text = {"name": "a text", "num_bytes": None}
    return {"seed": seed, "steps": 7, "fp32": fp32, "bf16": bf16, "text": text}


@pytest.mark.slow
def test_a_pair_differs_in_nothing_but_the_precision(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autocast_loss, "STEPS", 3)
    bits, trained = autocast_loss._bits, []

    def noted(config: TrainConfig) -> float:
        trained.append(config)
        return bits(config)

    monkeypatch.setattr(autocast_loss, "_bits", noted)
    (tmp_path / "text").write_text(text[:20_000], encoding="utf-8")
    arguments = ["run", "autocast-loss", "--text", tmp_path / "text", "--history", tmp_path / "h.jsonl"]

    def train(seeds: int) -> list[dict[str, Any]]:
        done = call(*arguments, "--threads", 1, "--seeds", seeds)
        assert done.exit_code == 0, done.output
        documents = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
        return [row for document in documents for row in document["rows"]]

    train(1)
    rows = train(2)  # trains the second pair only
    assert [row["seed"] for row in rows] == [0, 1]
    assert [(config.seed, config.autocast) for config in trained] == [
        (seed, precision) for seed in (0, 1) for precision in ("none", "bf16")
    ]
    for fp32, bf16 in zip(trained[::2], trained[1::2], strict=True):
        assert dataclasses.replace(bf16, autocast="none") == fp32
    for row in rows:
        assert 0 < abs(row["bf16"] - row["fp32"]) < 0.05  # they are two trainings, of the same model
    history = History.load(tmp_path)
    assert table("autocast-loss", history)[2].startswith("| 2 | 3 |")
    shared = table("autocast-loss", History((*history.runs, other_text(history))))
    assert shared[2].startswith("| 1 | 3 |")  # pairs of another text are not mixed with these


def other_text(history: History) -> Any:
    """The newest run, as if it had trained on another text a year later."""
    document = json.loads(json.dumps(history.runs[-1].document))
    document["time"] = "2099-01-01T00:00:00+00:00"
    document["rows"][0]["text"]["name"] = "another"
    return dataclasses.replace(history.runs[-1], document=document)


def test_the_interval_is_that_of_students_t() -> None:
    """Gosset's own example, hours of sleep that ten patients gained by a second drug (Biometrika 1908)."""
    gained = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert half_interval(gained) == pytest.approx(
        (2.4598858 - 0.7001142) / 2, abs=1e-4
    )  # R's `t.test(sleep…)`
    assert half_interval([1.0, 2.0]) == pytest.approx(12.706 * math.sqrt(0.5) / math.sqrt(2))
    assert half_interval([0.3]) == math.inf


def test_the_target_holds_if_the_whole_interval_is_within_it() -> None:
    near = [pair(0, 2.0, 2.0011), pair(1, 2.1, 2.1009), pair(2, 2.2, 2.2010)]
    assert (
        in_documents("autocast-loss", near)[2]
        == "| 3 | 7 | 2.1000 | 2.1010 | +0.0010 ± 0.0002 | +0.0009 | +0.0011 | yes |"
    )
    wide = [pair(0, 2.0, 2.004), pair(1, 2.1, 2.096), pair(2, 2.2, 2.2)]
    assert in_documents("autocast-loss", wide)[2].endswith("| **not shown** |")
    assert in_documents("autocast-loss", [pair(0, 2.0, 2.0)])[2].endswith(
        "| +0.0000 | +0.0000 | +0.0000 | **not shown** |"
    )
    assert in_documents("autocast-loss", [pair(seed, 2.0, 2.02) for seed in range(3)])[2].endswith(
        "| **not shown** |"
    )
