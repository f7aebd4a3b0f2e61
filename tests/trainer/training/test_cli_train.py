"""`xl-export train`: start, resume, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtimes.base.files import write_json
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from tests.commands import json_of, refused, xl
from tests.trainer.training.runs import lines_of, stop_at
from trainer.run.config import TrainConfig
from xl_export.cli.main import main

Make = Callable[..., TrainConfig]
SMALL = Path(__file__).parents[2] / "data" / "small"  # an artefact


@pytest.fixture
def config(make_config: Make, tmp_path: Path) -> str:
    write_json(tmp_path / "tiny.json", to_json(make_config(steps=4)))
    return str(tmp_path / "tiny.json")


def train(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def test_train_says_what_it_trains_and_what_comes_next(config: str, text_file: Path, tmp_path: Path) -> None:
    """The files of the run can be read as the umask says."""
    before = os.umask(0o027)
    try:
        result = train(config, "--out", tmp_path / "run")
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    assert f"xl-export export {tmp_path / 'run'}" in result.stdout
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"training on {text_file}: ")
    assert re.search(r": [\d,]+ tokens, vocabulary \d+, [\d,]+ parameters, cpu$", first)
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    names = ("config.json", "metrics.jsonl", "model.safetensors", "sampling.json", "test.txt")
    names += ("training.safetensors", "valid.txt", "vocab.json")
    assert modes == dict.fromkeys(names, "-rw-r-----")


def test_resume_continues_a_run(config: str, tmp_path: Path) -> None:
    assert train(config, "--out", tmp_path / "run").exit_code == 0
    result = train("--resume", tmp_path / "run", "--steps", "6")
    assert result.exit_code == 0, result.output
    assert "continues from step 4 to 6; the learning rate follows the longer schedule" in result.stdout
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 6
    refused(train("--resume", tmp_path / "run", "--steps", "5"), "--steps is 5", "larger")
    refused(
        train("--resume", tmp_path / "run", "--seed", "5"), "only --steps, --device, --text and", "--seed"
    )
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    write_json(tmp_path / "run/config.json", recorded | {"device": "mps"})  # as if from another machine
    assert train("--resume", tmp_path / "run", "--device", "cpu").exit_code == 0
    assert json.loads((tmp_path / "run/config.json").read_text()) == recorded
    assert lines_of(tmp_path / "run")[-1]["step"] == 6


def test_a_run_is_resumed_with_a_text_that_was_moved(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, " * 60)
    assert train("tiny", "--text", text, "--steps", 2, "--out", tmp_path / "run").exit_code == 0
    moved = text.rename(tmp_path / "moved.txt")
    refused(train("--resume", tmp_path / "run", "--steps", 3), "text.txt could not be read")
    assert train("--resume", tmp_path / "run", "--steps", 3, "--text", moved).exit_code == 0
    moved.write_text("other words, " * 200)
    refused(train("--resume", tmp_path / "run", "--steps", 4), "has changed since")


def test_an_existing_run_is_replaced_only_if_forced(config: str, tmp_path: Path) -> None:
    assert train(config, "--out", tmp_path / "run").exit_code == 0
    refused(train(config, "--out", tmp_path / "run"), "exists already", "--force")
    assert train(config, "--out", tmp_path / "run", "--force").exit_code == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refused(train(config, "--out", tmp_path / "run", "--force"), "also holds 'notes.txt'")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run/model.safetensors").is_file()


def test_a_run_that_learned_nothing_is_not_called_trained(make_config: Make, tmp_path: Path) -> None:
    write_json(tmp_path / "bad.json", to_json(make_config(steps=4, lr=50.0, warmup_steps=0)))
    result = train(tmp_path / "bad.json", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "is trained" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"{tmp_path / 'run'} has finished; next: ")
    assert "Warning: the best validation of this run is " in result.stderr
    assert "worse than the " in result.stderr


def test_a_run_without_a_validation_is_not_called_trained(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")
    rule = MemoryRule(mem_len=2, segment=2)
    sizes = {"text": str(tmp_path / "text.txt"), "steps": 2, "batch": 1, "training": rule, "evaluation": rule}
    write_json(tmp_path / "short.json", to_json(make_config(**sizes)))
    result = train(tmp_path / "short.json", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "Warning: this run was never validated" in result.stderr
    assert "is trained" not in result.stdout


@pytest.fixture
def small(make_config: Make, tmp_path: Path) -> Make:
    """`small(corpus)` → a configuration for that corpus which fits the smallest text."""

    def make(corpus: str | None) -> str:
        rule = MemoryRule(mem_len=4, segment=2)
        settings = make_config(
            steps=2, batch=1, text=None, vocab="word", corpus=corpus, training=rule, evaluation=rule
        )
        write_json(tmp_path / "small.json", to_json(settings))
        return str(tmp_path / "small.json")

    return make


def test_a_dataset_and_its_run_have_one_test_part(
    small: Make, dataset: Path, run: Path, tmp_path: Path
) -> None:
    assert train(small("penn-treebank"), "--data", dataset, "--out", tmp_path / "run").exit_code == 0
    scores = [
        json_of(xl("eval", tmp_path / "run", "--text", text, "--json"))
        for text in (dataset, tmp_path / "run/test.npy")
    ]
    assert scores[0]["nats_per_token"] == scores[1]["nats_per_token"]
    said = xl("generate", tmp_path / "run", "--prompt", "N years ", "--tokens", 3).stdout
    assert said.startswith("N years")
    assert "  " not in said
    refused(xl("eval", run, "--text", dataset), "another vocabulary than the model")
    refused(xl("eval", run, "--text", tmp_path / "run/test.npy"), "ids of another vocabulary", "test.json")


def test_ctrl_c_exits_130_with_the_command_that_resumes(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", to_json(make_config(steps=9, checkpoint_every=2)))
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        result = train(tmp_path / "config.json", "--out", tmp_path / "run")
    assert result.exit_code == 130, result.output
    assert result.stderr.rstrip().endswith(f"continue with `xl-export train --resume {tmp_path / 'run'}`")
    assert train("--resume", tmp_path / "run").exit_code == 0
