from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.learning import own_text
from benchmarks.cases.learning.own_text import CASE
from runtimes.base.records import to_json
from tests.benchmarks.shown import in_documents
from trainer.run.checkpoint import TEST
from trainer.run.config import TrainConfig
from trainer.run.overrides import with_overrides

STEPS = 8
TINY = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.head_dim=8", f"steps={STEPS}")


def test_texts_are_trained_once_and_scored_after_a_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    def tiny(**given: Any) -> tuple[TrainConfig, str]:
        return with_overrides(TrainConfig.load("tiny"), (*TINY, f"text={given['text']}")), "tiny"

    def measure(**more: Any) -> list[Any]:
        options = {"text": source, "out": tmp_path / "out", "minutes": 1.0}
        return CASE.measure(CASE.size({}), options=options, **more)

    def stopped(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    source = tmp_path / "book.txt"
    source.write_text(text[:9000] + "é", encoding="utf-8")
    monkeypatch.setattr(own_text, "SIZES", (8000, 9001, 10**6))  # the second one ends in half a character
    monkeypatch.setattr(own_text, "plan", tiny)
    with monkeypatch.context() as patch:
        patch.setattr(own_text, "evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            measure()
    kept: list[Any] = []
    rows = measure(keep=kept.append)
    assert kept == rows
    assert [(row.text_bytes, row.steps) for row in rows] == [(8000, STEPS), (9001, STEPS)]
    assert all(2 < row.bits_per_byte < 8 and row.sample for row in rows)
    tested = [path.read_text(encoding="utf-8") for path in (tmp_path / "out").glob(f"*/{TEST}")]
    assert len(tested) == 2
    assert all(each in text for each in tested)
    earlier = json.loads(json.dumps([to_json(row) for row in rows]))
    assert measure(earlier=earlier, keep=kept.append) == rows
    assert len(kept) == 2
    assert any("8 kB" in line for line in in_documents("own-text", rows))
