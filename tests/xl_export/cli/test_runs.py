"""`xl-export runs`: the table, the JSON, the picture, and folders that are no runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import CharVocab
from tests.commands import json_of, refused, xl
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel, count_parameters
from trainer.run.checkpoint import save_tensors
from trainer.run.config import TrainConfig
from trainer.run.history import Facts, tokens_after
from trainer.run.optimizer_config import OptimizerConfig

CONFIG = to_json(
    TrainConfig(
        model=ModelConfig(layers=2, d_model=16, heads=2, head_dim=8, d_ff=32, vocab_size=21),
        training=MemoryRule(mem_len=8, segment=8),
        evaluation=MemoryRule(mem_len=12, segment=6),
        text="text.txt",
        batch=4,
        steps=400,
        optimizer=OptimizerConfig(lr=0.01),
    )
)
VALID = "the memory is yours. " * 10
LINES: list[dict[str, Any]] = [
    {"step": 10, "bits_per_token": 3.0, "tokens_per_second": 100.0, "seconds": 5.0},
    {"step": 20, "bits_per_token": 2.5, "tokens_per_second": 300.0, "seconds": 9.0},
    {"step": 20, "validation_bits_per_token": 2.75, "validation_bits_per_byte": 1.25},
    {"step": 30, "bits_per_token": float("nan"), "tokens_per_second": 200.0, "seconds": 65.4},
    {"step": 30, "validation_bits_per_token": 2.8, "validation_bits_per_byte": 1.3},
    {"step": 30, "tokens_per_second": 10**400},  # no float holds it
]


def make_run(
    folder: Path, lines: list[dict[str, Any]] = LINES, *, held_out: str = "some", **changes: Any
) -> Path:
    """What `runs` reads of a run: batch 4, segment 8, 400 steps. held_out: the hash of that text."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "vocab.json").write_text(json.dumps(CharVocab.build(VALID).to_json()))
    facts = Facts(
        **{"text": "", "step": 30, "at": 0, "position": 0, "averaged": 0, "scale": 1.0, "scale_steps": 0},
        **{"ranks": 1, "validations": (), "epoch": 0, "lanes": 4, "limit": None, "final": None},
        held_out=held_out,
    )
    save_tensors(folder / "training.safetensors", {}, {"facts": json.dumps(to_json(facts))})
    model = LanguageModel(TrainConfig.from_json(CONFIG, where="").model)
    save_tensors(folder / "model.safetensors", model.state_dict())
    cut = '{"step": 40, "bits_per_tok'  # by a kill
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), cut]))
    return folder


def test_the_table_of_runs_begins_with_the_best(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    best = {"step": 7, "validation_bits_per_token": 3.125, "validation_bits_per_byte": 1.125}
    make_run(tmp_path / "b", [best], steps=7)
    make_run(tmp_path / "c", [])
    (tmp_path / "d").mkdir()  # no run
    lines = xl("runs", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "b", "a", "c"]
    assert " ".join(lines[1].split()[1:]) == "7 5.22k 224 3.1250 7 1.1250/byte 0.01 - -"
    assert " ".join(lines[2].split()[1:]) == "30 of 400 5.22k 960 2.7500 20 1.2500/byte 0.01 200 1m05s"
    b, a, c = json_of(xl("runs", tmp_path, "--json"))["runs"]
    assert a["path"] == str(tmp_path / "a")
    assert a["training"] == [[10, 320, 3.0], [20, 640, 2.5]]
    assert a["validations"] == [[20, 640, 2.75], [30, 960, 2.8]]
    assert (a["tokens"], a["planned"], a["seconds"]) == (960, 400, 65.4)
    assert a["parameters"] == count_parameters(TrainConfig.from_json(CONFIG, where="").model)
    assert (b["unit"], b["final_bits"]) == ("byte", None)
    assert (c["steps"], c["tokens"], c["best_bits"]) == (0, 0, None)


def test_validations_of_different_extents_are_not_compared_in_silence(tmp_path: Path) -> None:
    make_run(tmp_path / "a", validate_tokens=100)
    make_run(tmp_path / "b", validate_tokens=200)
    assert "validate_tokens differs between these runs" in xl("runs", tmp_path).stderr
    assert "validate_tokens" not in xl("runs", tmp_path / "a").stderr


def test_other_texts_and_units_are_not_ranked_in_silence(tmp_path: Path) -> None:
    bits = [{"step": 7, "validation_bits_per_token": 1.125}]
    for name in "abc":
        make_run(tmp_path / name, bits, held_out="other" if name == "b" else "some")
    assert not xl("runs", tmp_path / "a", tmp_path / "c").stderr
    said = xl("runs", tmp_path)
    assert "Warning: these runs were validated on different texts" in said.stderr
    assert "xl-export eval" in said.stderr
    assert "units" not in said.stderr
    make_run(tmp_path / "d", [{"step": 7, "validation_bits_per_token": 1.0, "validation_bits_per_byte": 2.0}])
    said = xl("runs", tmp_path / "a", tmp_path / "d")
    assert "scores for each byte, character, which are not comparable" in said.stderr
    assert [line.split()[0] for line in said.stdout.splitlines()] == ["run", "d", "a"], "by unit"


def test_a_run_keeps_the_hash_of_its_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some words " * 40)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"held out text {name} " * 9)
        files = ["--train", tmp_path / "train.txt", "--valid", tmp_path / f"{name}.txt"]
        data, run = tmp_path / f"data-{name}", tmp_path / "runs" / name
        assert xl("prepare", "text", *files, "--vocab", "byte", "--out", data).exit_code == 0
        sizes = ["--set", "batch=2", "--set", "validate_every=2", "--steps", 4]
        assert xl("train", "tiny", "--data", data, *sizes, "--out", run).exit_code == 0
    before = {
        run["path"]: run["held_out"] for run in json_of(xl("runs", tmp_path / "runs", "--json"))["runs"]
    }
    valid = {str(tmp_path / "runs" / name): (tmp_path / f"{name}.txt").read_bytes() for name in "ab"}
    assert before == {path: hashlib.sha256(text).hexdigest() for path, text in valid.items()}
    assert "validated on different texts" in xl("runs", tmp_path / "runs").stderr
    (tmp_path / "runs" / "a" / "training.safetensors").unlink()
    assert "is not known, so it may differ" in xl("runs", tmp_path / "runs").stderr


def test_tokens_follow_the_schedule_of_segments() -> None:
    config = TrainConfig.load("demo")
    grown = TrainConfig.from_json(CONFIG | {"segment_schedule": [[5, 3], [9, 12]]}, where="")
    assert tokens_after(config, 10) == 10 * 16 * 64
    assert [tokens_after(grown, n) for n in (0, 4, 7, 9, 11)] == [
        4 * n for n in (0, 4 * 8, 5 * 8 + 2 * 3, 5 * 8 + 4 * 3, 5 * 8 + 4 * 3 + 2 * 12)
    ]


def test_the_picture_has_a_curve_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from xl_export.plots import curves

    figures: list[Any] = []
    save = curves.save_figure

    def kept(figure: Any, path: Path) -> None:
        figures.append(figure)
        if len(figures) == 1:
            save(figure, path)
        path.touch()

    monkeypatch.setattr(curves, "save_figure", kept)
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", LINES[:1])
    for options in ([], ["--against", "steps", "--force"]):
        assert xl("runs", a, b, "--plot", tmp_path / "runs.png", *options).exit_code == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    for figure, x in zip(figures, ([640, 960], [20, 30]), strict=True):
        training, validation = figure.axes
        assert list(validation.get_lines()[0].get_xdata()) == x
        assert list(validation.get_lines()[0].get_ydata()) == [2.75, 2.8]  # the other run has no bytes
        names = [text.get_text() for text in validation.get_legend().get_texts()]
        assert names == ["a, best 2.7500", "b, never validated"]
        assert training.get_ylabel() == "bits per token"
    assert xl("runs", a, "--plot", tmp_path / "one.png").exit_code == 0
    assert list(figures[-1].axes[1].get_lines()[0].get_ydata()) == pytest.approx([1.25, 1.3], abs=0.03)
    assert figures[-1].axes[0].get_ylabel() == "bits per byte"
    refused(xl("runs", a, "--plot", tmp_path / "one.png"), "one.png", "--force")


def test_folders_that_are_no_runs_are_one_sentence(tmp_path: Path) -> None:
    half = make_run(tmp_path / "half")
    (half / "config.json").unlink()
    refused(xl("runs", half), "half/config.json could not be read")
    good, bad = make_run(tmp_path / "all" / "good"), make_run(tmp_path / "all" / "bad")
    (bad / "metrics.jsonl").write_text("a\nb\n")
    refused(xl("runs", good, bad), "bad/metrics.jsonl holds no line of a training")
    result = xl("runs", tmp_path / "all")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"Warning: {bad / 'metrics.jsonl'} holds no line")
    assert "good" in result.stdout
    (good / "config.json").write_text("{}")
    refused(xl("runs", good), "config.json", "'model' is missing")
