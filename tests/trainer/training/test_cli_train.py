"""`xl-export train`: start, resume, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtimes.base.files import write_json
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from tests.commands import json_of, refused, xl
from tests.trainer.data.corpus_files import make_source
from trainer.data.prepare import prepare
from trainer.run.config import TrainConfig, built_in
from xl_export.cli.main import main

Make = Callable[..., TrainConfig]
SMALL = Path(__file__).parents[2] / "data" / "small"  # an artefact


@pytest.fixture
def config(make_config: Make, tmp_path: Path) -> str:
    write_json(tmp_path / "tiny.json", to_json(make_config(steps=4)))
    return str(tmp_path / "tiny.json")


def train(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, and one sentence on standard error without a traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_train_writes_a_run_and_says_what_comes_next(config: str, tmp_path: Path) -> None:
    result = train(config, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert f"xl-export export {tmp_path / 'run'}" in result.stdout
    names = [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "sampling.json",
        "test.txt",
        "training.safetensors",
        "valid.txt",
        "vocab.json",
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


def test_resume_continues_a_run(config: str, tmp_path: Path) -> None:
    assert train(config, "--out", tmp_path / "run").exit_code == 0
    result = train("--resume", tmp_path / "run", "--steps", "6")
    assert result.exit_code == 0, result.output
    assert "continues from step 4 to 6; the learning rate follows the longer schedule" in result.stdout
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 6
    assert_refused(train("--resume", tmp_path / "run", "--steps", "5"), "--steps is 5", "larger")
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_options_replace_what_the_configuration_says(config: str, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("abcdefg\n" * 400)
    options = ["--steps", "3", "--seed", "7", "--vocab", "byte", "--text", tmp_path / "other.txt"]
    assert train(config, "--out", tmp_path / "run", *options).exit_code == 0
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert (stored["steps"], stored["seed"], stored["vocab"]) == (3, 7, "byte")
    assert stored["text"] == str((tmp_path / "other.txt").resolve())
    assert stored["model"]["vocab_size"] == 256


def test_an_existing_folder_is_refused_and_untouched_unless_forced(config: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/precious").write_text("mine")
    assert_refused(train(config, "--out", tmp_path / "run"), "holds other things")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]
    assert_refused(train(config, "--out", tmp_path / "run", "--force"), "holds other things")
    assert (tmp_path / "run/precious").read_text() == "mine"
    (tmp_path / "run/precious").unlink()
    assert train(config, "--out", tmp_path / "run", "--force").exit_code == 0
    assert train(config, "--out", tmp_path / "run", "--force").exit_code == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert_refused(train(config, "--out", tmp_path / "run", "--force"), "also holds 'notes.txt'")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run/model.safetensors").is_file()


def test_out_and_resume_exclude_each_other_and_one_is_needed(config: str, tmp_path: Path) -> None:
    for options in ([], ["--out", tmp_path / "a", "--resume", tmp_path / "b"]):
        assert_refused(train(config, *options), "either --out RUN", "or --resume RUN")


@pytest.mark.parametrize("option", [["--seed", "1"], ["--vocab", "byte"], ["--text", "x"]])
def test_resume_refuses_to_change_the_configuration(option: list[str], tmp_path: Path) -> None:
    assert_refused(train("--resume", tmp_path / "run", *option), "--resume", option[0])


def test_a_dataset_brings_its_vocabulary_so_vocab_is_refused(config: str, tmp_path: Path) -> None:
    options = ["--data", tmp_path / "dataset", "--vocab", "byte"]
    assert_refused(
        train(config, "--out", tmp_path / "run", *options), "--vocab is byte", "its own vocabulary"
    )


def test_the_weights_can_be_read_as_the_umask_says(config: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert train(config, "--out", tmp_path / "run").exit_code == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert set(modes.values()) == {"-rw-r-----"}, modes


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
    sizes = {"steps": 2, "batch": 1, "training": rule, "evaluation": rule}
    write_json(tmp_path / "short.json", to_json(make_config(**sizes)))
    result = train(tmp_path / "short.json", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "Warning: this run was never validated" in result.stderr
    assert "is trained" not in result.stdout


def test_resume_of_what_is_not_a_run_is_refused(config: str, tmp_path: Path) -> None:
    assert_refused(train("--resume", tmp_path / "none"), "cannot be resumed", "does not exist")
    (tmp_path / "none").touch()
    assert_refused(train("--resume", tmp_path / "none"), "it is a file; give the folder of a run")
    assert_refused(train("--resume", tmp_path), "is no run (it has no training.safetensors); give the folder")
    assert_refused(train("--resume", SMALL), "is an exported model", "give the folder of the run")
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.json").write_text("{}")
    assert_refused(train("--resume", data), "is a dataset; give the folder of a run", f"--data {data}`")
    shutil.rmtree(data)
    assert train(config, "--out", tmp_path / "b").exit_code == 0
    imported = Path(shutil.copytree(tmp_path / "b", tmp_path.with_name("imported")))
    (imported / "training.safetensors").unlink()
    assert_refused(train("--resume", imported), "has no training.safetensors, as a run that was imported")
    (tmp_path / "c").mkdir()
    assert_refused(train("--resume", tmp_path), f"is no run; {tmp_path / 'b'} in it is one, so give that")


def test_an_unknown_configuration_is_refused_and_the_list_has_each_once(tmp_path: Path) -> None:
    assert_refused(
        train("wt103-bas", "--out", tmp_path / "run"), "wt103-bas is neither", "wt103-base", "--list"
    )
    for options in (["", "--out", tmp_path / "run"], ["--show", "", "--out", tmp_path / "run"]):
        assert_refused(train(*options), "CONFIG is empty")
    assert not (tmp_path / "run").exists()
    result = train("--list")
    listed = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(built_in())
    assert json_of(train("--list", "--json")) == {"configurations": sorted(built_in())}


def test_training_says_what_it_trains_on(config: str, tmp_path: Path) -> None:
    first = train(config, "--out", tmp_path / "run").stdout.splitlines()[0]
    assert first.startswith(f"training on {tmp_path / 'text.txt'}: ")
    assert re.search(r": [\d,]+ tokens, vocabulary \d+, [\d,]+ parameters, cpu$", first)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    source = make_source(tmp_path / "in", "penn-treebank", "tar.gz")
    prepare("penn-treebank", source, tmp_path / "ptb", unverified=True, progress=False)
    return tmp_path / "ptb"


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


@pytest.mark.parametrize("name", ["wt103-base", "enwik8-base", "ptb", "lm1b-base", "figure2-ff-attn"])
def test_a_published_configuration_wants_its_corpus(name: str, dataset: Path, tmp_path: Path) -> None:
    corpus = TrainConfig.load(name).corpus
    without = train(name, "--out", tmp_path / "run")
    assert_refused(
        without,
        f"the configuration is for {corpus}",
        f"xl-export prepare {corpus}",
        "--data DATASET",
        "--text FILE",
    )
    if corpus != "penn-treebank":
        other = train(name, "--data", dataset, "--out", tmp_path / "run")
        assert_refused(other, f"{dataset} is penn-treebank and the configuration is for {corpus}")
    assert not (tmp_path / "run").exists()


def test_a_configuration_takes_its_corpus_or_a_text(small: Make, dataset: Path, tmp_path: Path) -> None:
    for number, corpus in enumerate(("penn-treebank", None)):
        result = train(small(corpus), "--data", dataset, "--out", tmp_path / f"run{number}")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("training on penn-treebank: ")
    result = train(small("wikitext-103"), "--text", tmp_path / "text.txt", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output


def test_a_run_on_a_dataset_scores_the_datasets_test_part_and_its_own(
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["text.txt could not be read"]),
        (b"", ["text.txt is empty"]),
        (b"too short", ["too few for 4 lanes"]),
        (b"abc\xff" * 300, ["line 1 of ", "text.txt is not UTF-8 (byte 0xff)"]),
    ],
)
def test_a_bad_text_is_refused(config: str, tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    if content is None:
        (tmp_path / "text.txt").unlink()
    else:
        (tmp_path / "text.txt").write_bytes(content)
    assert_refused(train(config, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stepz": 1}, ["unknown key 'stepz'"]),
        ({"steps": "1"}, ["'steps'", "expected a whole number"]),
        ({"schedule": {"warmup_steps": 99}}, ["schedule.warmup_steps is 99"]),
        ({"optimizer": {"lr": 1e30}, "schedule": {}}, ["loss became nan at step 2", "optimizer.lr"]),
    ],
)
def test_a_bad_configuration_is_refused(
    config: str, tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    data = json.loads(Path(config).read_text())
    write_json(Path(config), data | change)
    result = train(config, "--out", tmp_path / "run")
    message = result.stderr[
        result.stderr.index("Error: ") :
    ]  # the progress bar of a run that began comes first
    assert result.exit_code == 2
    assert message.count("\n") == 1
    assert all(word in message for word in words), message


def test_a_damaged_run_is_refused(config: str, tmp_path: Path) -> None:
    assert train(config, "--out", tmp_path / "run").exit_code == 0
    (tmp_path / "run/training.safetensors").write_bytes(b"")
    assert_refused(train("--resume", tmp_path / "run"), "training.safetensors is missing or damaged")


def test_ctrl_c_exits_130_with_the_command_that_resumes(make_config: Make, tmp_path: Path) -> None:
    write_json(tmp_path / "long.json", to_json(make_config(steps=10**6, checkpoint_every=2)))
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from xl_export.cli.main import main; main()",
        "train",
        str(tmp_path / "long.json"),
    ]
    process = subprocess.Popen(
        [*command, "--out", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (
        run.is_dir() and (run / "metrics.jsonl").read_bytes().count(b"\n") > 10
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors.rstrip().endswith(f"continue with `xl-export train --resume {run}`")
    assert "Traceback" not in errors
    stored = json.loads((run / "config.json").read_text())
    write_json(
        run / "config.json", stored | {"steps": len((run / "metrics.jsonl").read_text().splitlines()) + 4}
    )
    result = train("--resume", run)
    assert result.exit_code == 0, result.output
