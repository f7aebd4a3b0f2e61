"""The demo shows the trained models at once, and trains only where it is asked to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.tasks.check import check
from tests.commands import json_of, xl
from xl_export.demo import run as demo


def test_the_trained_models_write_and_play_and_nothing_is_trained(tmp_path: Path) -> None:
    ended = xl("demo", "--out", tmp_path / "demo", "--json")
    assert ended.exit_code == 0, ended.output
    figures = json_of(ended)
    assert figures["passed"]
    report = check(demo.STORIES, device="cpu")
    assert figures["trained_model"]["check"]["max_difference"] == report.max_difference
    assert "scores" not in figures
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"story.txt", "music.mid", "music.wav"}
    assert "run" not in {path.name for path in (tmp_path / "demo").iterdir()}
    story = (tmp_path / "demo/story.txt").read_text()
    assert story.startswith(demo.STORY)
    assert len(story) > len(demo.STORY) + 400
    assert story in ended.stderr
    assert demo.OPENING in ended.stderr
    # The titles say with which seeds the texts can be written again.
    seeds = re.findall(r"^== (a trained model writes|a story|music): .*\bseed (\d+)\b", ended.stderr, re.M)
    assert [step for step, _ in seeds] == ["a trained model writes", "a story", "music"]
    drawn = ("--seed", seeds[1][1], "--tokens", demo.STORY_TOKENS)
    assert "(seed 41, temperature 0.8, top-k 40, top-p 0.9)" in ended.stderr
    assert xl("generate", demo.STORIES, "--prompt", demo.STORY, *drawn).stdout == story
    # The second time nothing is lost without a word.
    again = xl("demo", "--out", tmp_path / "demo")
    assert again.exit_code == 2
    assert "exists already; give another --out, or --force" in again.stderr
    assert xl("demo", "--out", tmp_path / "demo", "--force").exit_code == 0
    assert (tmp_path / "demo/story.txt").read_text() == story


def test_the_demo_loads_no_pytorch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = None\n"
        "from xl_export.cli.main import main; main(['demo', '--out', sys.argv[1]])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "demo"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "demo/story.txt").is_file()


def test_without_the_models_the_demo_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_shipped", lambda *artefact: None)
    ended = xl("demo", "--out", tmp_path / "demo")
    assert ended.exit_code == 2
    assert "start the demo in a checkout of the repository, or give --train" in ended.stderr
    assert not (tmp_path / "demo").exists()


def test_a_small_model_is_trained_and_compared_on_request(tmp_path: Path) -> None:
    """An interrupted demo, which has a run and no story, is replaced too."""
    (tmp_path / "demo/run").mkdir(parents=True)
    (tmp_path / "demo/run/metrics.jsonl").touch()
    ended = xl("demo", "--train", "--steps", 2, "--out", tmp_path / "demo", "--force", "--json")
    assert ended.exit_code == 0, ended.output
    figures = json_of(ended)
    assert set(figures["scores"]) == {
        f"{engine}, memory {memory}"
        for engine in ("PyTorch", "ONNX Runtime")
        for memory in ("128", "cut to zero")
    }
    assert figures["check"]["passed"]
    assert check(tmp_path / "demo/artefact", device="cpu").passed
    lines = ended.stderr.splitlines()
    assert any(line.startswith("artefact against PyTorch") and "passed" in line for line in lines)
    assert "== train a small one: 2 steps on the built-in corpus, seed 0\n" in ended.stderr
    assert "== generate: 200 characters, seed 0, top-k 40\n" in ended.stderr
    assert ended.stderr.index("sliding window") < ended.stderr.index(demo.STORY)
