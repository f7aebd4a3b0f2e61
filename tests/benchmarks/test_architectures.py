"""Six small models for the same CPU time: nearly equal sizes, both scores, no result where one is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import architectures
from benchmarks.cases.architectures import MODELS, affordable, check, chosen, recipe
from runtimes.base.errors import ArtefactError, ConfigError
from trainer.data.source import load_source, with_vocab_size
from trainer.model.attention import relative_attention
from trainer.model.config import ModelConfig
from trainer.model.model import count_parameters
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.state import Training

TERMS = [
    *(("Transformer-XL", term) for term in ("position", "u", "v")),
    *(("without recurrence", term) for term in ("position", "u", "v")),
    *(("Shaw positions", term) for term in ("position", "bias", "u")),
    ("all-attention", "position"),
    *(("all-attention, adaptive span", term) for term in ("position", "gate")),
]


def test_the_models_have_nearly_equal_numbers_of_parameters() -> None:
    counts = [
        count_parameters(dataclasses.replace(ModelConfig(**sizes), vocab_size=100))
        for sizes, _ in MODELS.values()
    ]
    assert max(counts) / min(counts) < 1.02


def test_all_models_share_everything_but_what_is_compared() -> None:
    recipes = [recipe(name, threads=1) for name in MODELS]
    for field in ("batch", "seed", "optimizer", "schedule", "vocab"):
        assert len({getattr(config, field) for config in recipes}) == 1, field
    assert {config.training.segment for config in recipes} == {architectures.T}
    assert {config.training.mem_len for config in recipes} == {0, architectures.T}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_passes_its_check(name: str) -> None:
    check(recipe(name, threads=1))


def test_an_attention_that_is_wrong_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda *given, **options: architectures.naive_attention(*given, **options) * 1.001  # noqa: E731
    monkeypatch.setattr(architectures, "relative_attention", wrong)
    with pytest.raises(ArtefactError, match=r"fast and naive attention differ by .* nothing was trained"):
        check(recipe("Transformer-XL", threads=1))


@pytest.mark.parametrize(("name", "term"), TERMS)
def test_no_term_of_the_scores_can_be_lost_unseen(
    name: str, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lambda *given, terms, **options: relative_attention(  # noqa: E731
        *given, terms=dataclasses.replace(terms, **{term: None}), **options
    )
    monkeypatch.setattr(architectures, "relative_attention", lost)
    with pytest.raises(ArtefactError, match="nothing was trained"):
        check(recipe(name, threads=1))


@pytest.mark.parametrize("name", ["Shaw positions", "all-attention"])
def test_training_reaches_the_row_that_stands_for_all_longer_distances(
    name: str, tmp_path: Path, text: str
) -> None:
    (tmp_path / "text.txt").write_text(text[:20_000], encoding="utf-8")
    config = dataclasses.replace(
        recipe(name, threads=1), text=str(tmp_path / "text.txt"), batch=2, optimizer=OptimizerConfig(clip=1e9)
    )
    source = load_source(config)
    training = Training.start(with_vocab_size(config, source.vocab))
    rows = training.model.get_parameter("positions.table")
    before = rows.detach().clone()
    for _ in range(2):  # the first segment has no memory, so no such distance
        training.advance(source.tokens)
    last = (slice(None), -1) if rows.ndim == 4 else -1
    assert not torch.equal(rows[last], before[last])


def test_names_are_those_of_the_table() -> None:
    assert chosen(()) == list(MODELS)
    assert chosen(("all-attention", "Transformer-XL")) == ["Transformer-XL", "all-attention"]
    with pytest.raises(ConfigError, match="transformer-xxl is not one of the models"):
        chosen(("transformer-xxl",))


def test_the_budget_decides_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says 2 seconds for the timed steps, 60 seconds pay for thirty times as many."""
    ticks = iter((100.0, 102.0))
    monkeypatch.setattr(architectures.time, "process_time", lambda: next(ticks))
    assert affordable(recipe("without recurrence", threads=1), 60.0) == 30 * architectures.TIMED


def test_the_command_prints_both_scores_and_keeps_the_history(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(text[:60_000], encoding="utf-8")
    whole = architectures.recipe
    monkeypatch.setattr(
        architectures,
        "recipe",
        lambda *a, **k: dataclasses.replace(whole(*a, **k), text=str(tmp_path / "text.txt")),
    )
    monkeypatch.setattr(architectures, "affordable", lambda config, seconds: 2)
    monkeypatch.setattr(architectures, "POSITIONS", 20)
    monkeypatch.setattr("benchmarks.history.measure_limits", lambda threads: measured)
    from benchmarks.measure import Limits

    measured = Limits(read_bytes=1e9, multiply_adds=1e9)
    names = ["vanilla (sinusoids, no recurrence)", "all-attention, adaptive span"]
    only = [part for name in names for part in ("--only", name)]
    arguments = [
        "run",
        "architectures",
        "--out",
        str(tmp_path / "runs"),
        "--history",
        str(tmp_path / "h.jsonl"),
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(main, [*arguments, *only, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "h.jsonl").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == document
    assert [row["name"] for row in document["rows"]] == names
    for row in document["rows"]:
        assert row["steps"] == 2
        assert row["tokens"] == 2 * 16 * 64
        assert row["budget_seconds"] == 180
        assert TrainConfig.from_json(row["recipe"], where="history").steps == 2
        assert set(row["exact"]) == set(row["stream"]) == {"64", "256"}
        assert all(1 < bits < 9 for bits in (*row["exact"].values(), *row["stream"].values()))
    assert document["engine"] == "torch"
    assert document["rows"][0]["mean_span"] is None
    assert document["rows"][1]["mean_span"] == pytest.approx(16, abs=1)
    assert "| vanilla (sinusoids, no recurrence) |" in done.stdout


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_budget_is_refused(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"minutes is .*; expected a positive number"):
        architectures.run(tmp_path, minutes=minutes, threads=1)


BAD = [
    (("--only", "nobody"), "nobody is not one of the models"),
    (("--minutes", "0"), "minutes is 0.0; expected a positive"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_input_is_one_sentence(options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["run", "architectures", *options, "--history", str(tmp_path / "h.jsonl")]
    )
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr
    assert not (tmp_path / "h.jsonl").exists()
