"""Published recipes for a stated time: every reduced one is a recipe, and a stopped run goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.learning import recipes
from benchmarks.cases.learning.recipes import RECIPES, Recipe, Row, Wanted, configuration, folder_name
from benchmarks.documents import table
from benchmarks.runs import History
from runtimes.base.records import to_json
from tests.benchmarks.shown import a_run, in_documents
from trainer.model.model import count_parameters
from trainer.run.config import TrainConfig

SIZE = recipes.CASE.size({})
TINY = (
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.head_dim=8", "model.d_ff=32"),
    *("training.segment=16", "training.mem_len=16", "evaluation.segment=16", "evaluation.mem_len=16"),
    *("evaluation.clamp_len=null", "batch=4"),
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_reduced_recipe_keeps_what_it_does_not_name(name: str) -> None:
    recipe = RECIPES[name]
    published, config = TrainConfig.load(recipe.base), configuration(recipe, None, threads=1)
    sizes = [count_parameters(dataclasses.replace(c.model, vocab_size=10_000)) for c in (config, published)]
    assert sizes[0] < sizes[1]
    kept = ("corpus", "vocab", "averaging")
    assert [getattr(config, key) for key in kept] == [getattr(published, key) for key in kept]
    assert config.optimizer.kind == published.optimizer.kind
    assert config.model.sublayers == published.model.sublayers
    assert config.model.vocabulary == published.model.vocabulary


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> dict[str, Any]:
    """One recipe of a few steps on a piece of enwik8 that is no enwik8."""
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "enwik8.piece").write_bytes(text.encode()[:20_000])
    monkeypatch.setattr(
        recipes,
        "RECIPES",
        {"tiny": Recipe(base="enwik8-base", pattern="enwik8*", published=1.06, changes=TINY)},
    )
    monkeypatch.setattr(recipes, "affordable", lambda config, seconds: 20)
    monkeypatch.setattr(recipes, "VALIDATIONS", 4)
    return {"minutes": 1, "corpora": tmp_path / "corpora", "names": ["tiny"]}


def measure(
    out: Path, *, earlier: Sequence[Any] = (), keep: Any = lambda row: None, **options: Any
) -> list[Any]:
    options["out"] = out
    return recipes.CASE.measure(SIZE, threads=1, options=options, earlier=earlier, keep=keep)


def test_a_stopped_run_continues_and_a_finished_row_stays(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object, **options: object) -> float:
        raise KeyboardInterrupt

    kept: list[Row] = []
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "out", **tiny)
    (row,) = measure(tmp_path / "out", keep=kept.append, **tiny)
    assert kept == [row]
    assert row.cpu_seconds is None  # an earlier process trained it
    assert row.corpus["published"] is False
    assert row.corpus["tokens"] == {"train": 18_000, "valid": 1_000, "test": 1_000}
    assert [step for step, _ in row.validation] == [5, 10, 15, 20]
    assert 3 < row.test < 8
    before = json.loads(json.dumps([to_json(row), {"name": "a row of another case"}]))
    again = measure(tmp_path / "elsewhere", earlier=before, keep=kept.append, **tiny)
    assert [json.loads(json.dumps(to_json(other))) for other in again] == before[:1]
    assert len(kept) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_row_with_other_facts_is_trained_again(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def trained(job: Wanted, source: Path, data: Path, out: Path, progress: object) -> Row:
        made.append(job)
        assert data == out / "data" / f"enwik8-{hashlib.sha256(source.read_bytes()).hexdigest()[:8]}"
        fields = dict.fromkeys(Row.__dataclass_fields__) | job | {"test": 1.0}
        del fields["sha256"]
        return Row(**fields | {"corpus": {"sha256": job["sha256"]}})

    made: list[Wanted] = []
    monkeypatch.setattr(recipes, "_trained", trained)
    (row,) = measure(tmp_path / "out", **tiny)
    before = [to_json(row)]
    assert measure(tmp_path / "out", earlier=before, **tiny) == [row]
    assert len(made) == 1
    for other in ({"protocol": 0}, {"threads": 2}, {"changes": ["batch=2"]}, {"budget_seconds": 1.0}):
        measure(tmp_path / "out", earlier=[before[0] | other], **tiny)
    (tmp_path / "corpora" / "enwik8.piece").write_bytes(text.encode()[20_000:40_000])
    measure(tmp_path / "out", earlier=before, **tiny)
    assert [job["sha256"] == made[0]["sha256"] for job in made] == [True] * 5 + [False]
    assert len(list((tmp_path / "out" / "data").iterdir())) == 2
    folders = [folder_name(made[0] | facts) for facts in ({}, {"threads": 2}, {"changes": []})]
    assert len({*folders, folder_name(made[-1])}) == 4


def test_the_table_has_passes_and_perplexities() -> None:
    row: dict[str, Any] = {
        "name": "a",
        "parameters": 3_000_000,
        "steps": 100,
        "step_tokens": 20,
        "unit": "word",
    }
    row |= {"cpu_seconds": 90.0, "validation": [[50, 8.0], [100, 9.0]], "test": 7.0, "published": 54.52}
    row |= {"corpus": {"name": "b", "sha256": "0" * 64, "tokens": {"train": 500, "valid": 5, "test": 5}}}
    cells = "| a | 3.0M | 0.00 | 4.00 | 1.5 | perplexity 256.0 | perplexity 128.0 | 54.52 |"
    assert in_documents("recipes", [row])[2] == cells
    runs = [a_run("recipes", [row | {"test": bits}]) for bits in (5.0, 6.0)]
    assert "perplexity 64.0" in table("recipes", History(tuple(runs)))[2]
