"""The demo shows the trained models at once, and trains only where it is asked to."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from runtimes.tasks.check import check
from tests.commands import json_of, refused, xl
from xl_export.demo import run as demo
from xl_export.demo import shipped, small_model


def test_the_trained_models_write_and_play_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(demo, "measure_flat", functools.partial(shipped.measure_flat, tokens=9))
    monkeypatch.setattr(demo, "play_music", functools.partial(shipped.play_music, seconds=3))
    monkeypatch.setattr(demo, "STORY_TOKENS", 60)
    ended = xl("demo", "--out", tmp_path / "demo", "--json")
    assert ended.exit_code == 0, ended.output
    figures = json_of(ended)
    assert figures["passed"]
    assert figures["trained_model"]["check"]["passed"]
    assert "scores" not in figures
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"story.txt", "music.mid", "music.wav"}
    assert "run" not in {path.name for path in (tmp_path / "demo").iterdir()}
    story = (tmp_path / "demo/story.txt").read_text()
    assert story.startswith(demo.STORY)
    assert len(story) > len(demo.STORY) + 60
    assert story in ended.stderr
    assert demo.OPENING in ended.stderr
    # The titles say with which seeds the texts can be written again.
    seeds = re.findall(r"^== (a trained model writes|a story|music): .*\bseed (\d+)\b", ended.stderr, re.M)
    assert [step for step, _ in seeds] == ["a trained model writes", "a story", "music"]
    assert "(seed 2, temperature 0.9, top-k 40, top-p 0.8, repetition-penalty 1.1)" in ended.stderr
    for name in ("story.txt", "music.mid", "music.wav"):
        with open(tmp_path / "demo" / name, "ab") as stream:
            stream.write(b"later")
    ended = xl("demo", "--out", tmp_path / "demo")
    assert ended.exit_code == 0, ended.output
    for name in ("story.txt", "music.mid", "music.wav"):
        assert (tmp_path / "demo" / name).read_bytes().endswith(b"later"), "it may have been edited"
    assert ended.output.count("stays as it is (--force replaces it)") == 2
    assert xl("demo", "--out", tmp_path / "demo", "--force").exit_code == 0
    for name in ("story.txt", "music.mid", "music.wav"):
        assert not (tmp_path / "demo" / name).read_bytes().endswith(b"later")


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_shipped", lambda *artefact: None)


def test_without_the_models_the_demo_says_where_they_are(no_models: None, tmp_path: Path) -> None:
    words = "start the demo in a checkout of the repository, or give --train"
    refused(xl("demo", "--out", tmp_path / "demo"), words)
    assert not (tmp_path / "demo").exists()
    with pytest.raises(UserError, match=r"play\.py: "):
        shipped.play_music(tmp_path / "artefact", tmp_path / "music")


def test_a_small_model_is_trained_and_compared_on_request(
    no_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted demo, which has a run and no story, is replaced too."""
    load = small_model.TrainConfig.load
    monkeypatch.setattr(
        small_model.TrainConfig, "load", lambda name: load("tiny" if name == "demo" else name)
    )
    monkeypatch.setattr(small_model, "read_bytes", lambda path: path.read_bytes()[:1000])
    (tmp_path / "demo/run").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / "demo/run" / name).touch()
    ended = xl("demo", "--train", "--steps", 2, "--out", tmp_path / "demo", "--force", "--json")
    assert ended.exit_code == 0, ended.output
    figures = json_of(ended)
    assert set(figures["scores"]) == {
        f"{engine}, memory {memory}"
        for engine in ("PyTorch", "ONNX Runtime")
        for memory in ("64", "cut to zero")
    }
    for memory in ("64", "cut to zero"):
        one, other = (figures["scores"][f"{e}, memory {memory}"] for e in ("PyTorch", "ONNX Runtime"))
        assert one["bits_per_token"] == pytest.approx(other["bits_per_token"], abs=1e-4)
    cost = figures["sliding_window"]
    assert cost["ratio"] == cost["window"] / cost["segment"]
    assert cost["attention_length"] == 64
    assert len(figures["text"]) > small_model.GENERATED_CHARACTERS
    assert figures["check"]["passed"]
    assert check(tmp_path / "demo/artefact", device="cpu").passed
    lines = ended.stderr.splitlines()
    assert any(line.startswith("artefact against PyTorch") and "passed" in line for line in lines)
    assert "== train a small one: 2 steps on the built-in corpus, seed 0\n" in ended.stderr
    assert "== generate: 200 characters, seed 0, top-k 40\n" in ended.stderr
