"""The case that measures what validations cost: what it compares, counts and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.arithmetic import validation_share
from benchmarks.cases.learning import validation
from benchmarks.cases.learning.validation import Recipe
from benchmarks.render import markdown
from benchmarks.runs import Run
from runtimes.base.errors import ArtefactError
from tests.benchmarks.shown import in_documents, rows_of
from trainer.run.config import TrainConfig
from trainer.training.validation import validate

TINY = (
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.head_dim=8", "model.d_ff=16"),
    *("model.vocab_size=30", "batch=4", "training.segment=8", "training.mem_len=8"),
    *("evaluation.segment=4", "evaluation.mem_len=12", "evaluation.clamp_len=null"),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(base="enwik8-base", held_out=5_000_000, vocab_size=205, changes=TINY)
    monkeypatch.setattr(validation, "RECIPES", {"tiny": recipe})


def test_both_costs_and_the_share_are_right(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def noted(model: object, config: TrainConfig, tokens: np.ndarray) -> float:
        counted.append(len(tokens) - 1)
        return validate(model, config, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(validation, "validate", noted)
    arguments = ["run", "validation", "--repeats", "2", "--threads", "1", "--history", tmp_path / "h.jsonl"]
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "h.jsonl").read_text())
    (row,) = document["rows"]
    assert set(counted) == {4 * validation.SEGMENTS * 8}  # lanes, and segments as long as those of training
    assert row["trained"]["repeats"] == row["validated"]["repeats"] == 2
    assert row["ratio"] == row["validated"]["median"] / row["trained"]["median"]
    published = validation._with_vocab(TrainConfig.load("enwik8-base"), 205)
    assert row["share"] == validation_share(published, 5_000_000)
    # By hand, for a segment of 8 and widths of 16. Training projects its memory of 8 again, sees 16
    # distances, and has a backward pass with twice the products. A validation sees 20 keys at 13 distances.
    output = 8 * 16 * 30
    trained = 3 * (256 * (2 * 8 + 2 * 16) + 2 * 256 * 8 + 16 * 8 * (2 * 16 + 16) + output)
    validated = 256 * (2 * 8 + 2 * 8) + 2 * 256 * 8 + 16 * 8 * (2 * 20 + 13) + output
    assert row["arithmetic"] == pytest.approx(validated / trained)
    document |= {"threads": 1, "machine": {**document["machine"], "cpus": 1, "busy_cpus": 0}}
    assert markdown(validation.CASE, [Run(document)])[2].startswith("| tiny |")


def test_a_validation_that_gives_another_score_is_not_timed(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "validate", lambda *arguments: validate(*arguments) + 0.001)
    with pytest.raises(ArtefactError, match=r"a validation \(\d.*differs from the evaluation"):
        rows_of("validation", validation.size(), repeats=1)


def test_the_target_is_judged_with_the_measured_cost() -> None:
    def row(ratio: float) -> dict[str, object]:
        times = {"trained": {"median": 0.5}, "validated": {"median": 0.5 * ratio}}
        return {"name": "a", **times, "ratio": ratio, "arithmetic": 0.25, "share": 0.01}

    assert in_documents("validation", [row(0.4)])[2].endswith("| 0.40 | 0.25 | 1.00 % | 1.60 % |")
    assert in_documents("validation", [row(0.6)])[2].endswith("| 1.00 % | 2.40 % (**above 2 %**) |")
