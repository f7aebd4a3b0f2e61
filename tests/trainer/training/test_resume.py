"""A run stopped at any moment resumes to the same bits; what cannot be resumed is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.run.checkpoint as checkpoint
import trainer.training.snapshot as snapshot
from runtimes.base.errors import ArtefactError, ConfigError, UserError
from runtimes.contract.rule import MemoryRule
from tests.nightly import every
from tests.trainer.data.corpus_files import make_source
from tests.trainer.training.runs import assert_same_run, state, train_until
from trainer.data.prepare import prepare
from trainer.run.config import Averaging, TrainConfig
from trainer.training.loop import resume, train

Make = Callable[..., TrainConfig]


@pytest.mark.parametrize("stop", every(3, [0, 1, 4, 5, 6, 9, 19]))
def test_a_stopped_run_resumes_to_the_same_bits(make_config: Make, tmp_path: Path, stop: int) -> None:
    config = make_config(dropout=0.2, attention_dropout=0.1)
    whole = train(config, tmp_path / "whole", progress=False)
    train_until(config, tmp_path / "stopped", stop)
    assert state(tmp_path / "stopped")[1]["step"] == stop // 5 * 5
    torch.manual_seed(99)  # another process would not have this one's random state
    assert_same_run(resume(tmp_path / "stopped", progress=False), whole)


@pytest.mark.parametrize(
    "changes",
    every(
        3,
        [
            {"batch": 1},
            {"training": MemoryRule(mem_len=0, segment=8)},
            {"training": MemoryRule(mem_len=20, segment=3, initial_memory="zeros", clamp_len=4)},
            {"pre_norm": True, "tie_biases": False},
            {"vocab": "byte"},
            {"vocab": "word"},
            {"vocab": "subword", "max_size": 280},
            {"batch": 90},  # wraps around after four steps
            {"optimizer": "adagrad", "accumulate": 2, "schedule": "inverse-sqrt", "dropout": 0.1},
            {"optimizer": "adamw", "weight_decay": 0.1, "betas": (0.8, 0.95)},
            {"autocast": "bf16", "accumulate": 4},
            {"autocast": "fp16"},
            {"averaging": Averaging(start_step=5)},
            {"averaging": Averaging(start_step=9)},
            {
                "schedule": "plateau",
                "validate_every": 1,
                "averaging": Averaging(patience=0),
                "lr": 0.3,
            },
            {"mem_len_schedule": ((3, 12), (7, 4), (9, 20)), "segment_schedule": ((5, 3), (8, 11))},
            {"patience": 4, "validate_every": 1, "lr": 0.3, "checkpoint_every": 3},
        ],
    ),
)
def test_every_kind_of_run_resumes(make_config: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(steps=12, **changes)
    whole = train(config, tmp_path / "whole", progress=False)
    train_until(config, tmp_path / "stopped", 8)
    assert_same_run(resume(tmp_path / "stopped", progress=False), whole)


# States are written at steps 0, 5, 10, 15 and 20, models at 0, 5, and the best validations, 10 and 20.
@pytest.mark.parametrize(
    ("half", "number"),
    [
        ("training.safetensors", 3),
        ("training.safetensors", 5),
        ("model.safetensors", 3),
        ("model.safetensors", 4),
    ],
)
def test_a_stop_between_the_files_of_a_checkpoint_leaves_one_that_resumes(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str, number: int
) -> None:
    whole, save = train(make_config(), tmp_path / "whole", progress=False), snapshot.save_tensors
    saves = []

    def stopping(path: Path, *arguments: Any) -> None:
        saves.append(path.name)
        if path.name == half and saves.count(half) == number:
            raise KeyboardInterrupt
        save(path, *arguments)

    monkeypatch.setattr(snapshot, "save_tensors", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(make_config(), tmp_path / "stopped", progress=False)
    monkeypatch.undo()
    assert_same_run(resume(tmp_path / "stopped", progress=False), whole)


def test_a_torn_last_line_and_lines_after_the_checkpoint_are_dropped(
    make_config: Make, tmp_path: Path
) -> None:
    whole = train(make_config(), tmp_path / "whole", progress=False)
    train_until(make_config(), tmp_path / "stopped", 9)
    with open(tmp_path / "stopped/metrics.jsonl", "ab") as stream:
        stream.write(b'{"step": 9, "loss_nats": 9.9}\n' + 5000 * b"[" + b'\n\xff\x00\n{"step": 10, "loss_n')
    assert_same_run(resume(tmp_path / "stopped", progress=False), whole)


def test_resuming_a_finished_run_changes_nothing(make_config: Make, tmp_path: Path) -> None:
    run = train(make_config(steps=4), tmp_path / "run", progress=False)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != "training.safetensors"}
    resume(run, progress=False)
    assert before == {
        path.name: path.read_bytes() for path in run.iterdir() if path.name != "training.safetensors"
    }


def test_a_run_with_a_relative_text_resumes_from_another_folder(
    make_config: Make, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_until(make_config(text="text.txt"), tmp_path / "run", 6)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(tmp_path / "run", progress=False)
    assert state(tmp_path / "run")[1]["step"] == 20


def test_resuming_a_finished_run_says_so(
    make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(make_config(steps=4), tmp_path / "run", progress=False)
    resume(run)
    assert (
        capsys.readouterr().out
        == f"{run} is finished already, at step 4 of 4; there is nothing to continue\n"
    )


def test_the_scale_of_the_loss_is_resumed(make_config: Make, tmp_path: Path) -> None:
    train_until(make_config(autocast="fp16"), tmp_path / "run", 7)
    tensors, facts = state(tmp_path / "run")
    assert facts["step"] == 5
    assert facts["scale"] in (2.0**16, 2.0**15), "the first scale, or half of it after a step out of range"
    checkpoint.save_tensors(
        tmp_path / "run/training.safetensors",
        tensors,
        {"facts": json.dumps(facts | {"scale": 2.0**9, "scale_steps": 1990})},
    )
    facts = state(resume(tmp_path / "run", progress=False))[1]
    assert (facts["scale"], facts["scale_steps"]) == (2.0**10, 5), "it doubles after 2000 steps in range"


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 21},
        {"step": "5"},
        {"at": -1},
        {"position": 1 << 60},
        {"ranks": 0},
        {"ranks": 1 << 60},
        {"scale": 0.0},
        {"scale_steps": 0.5},
        {"validations": [{"step": 1}]},
        {"validations": 3},
        {"unknown": 1},
        {"averaged": None},
        None,
    ],
)
def test_facts_that_are_none_are_refused(
    make_config: Make, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    path = tmp_path / "run/training.safetensors"
    tensors, facts = state(tmp_path / "run")
    checkpoint.save_tensors(path, tensors, {"facts": "{" if change is None else json.dumps(facts | change)})
    with pytest.raises(ArtefactError, match=r"training\.safetensors (does not say|was written at)") as caught:
        resume(tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)


def test_a_random_state_that_is_none_is_refused(make_config: Make, tmp_path: Path) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    tensors, facts = state(tmp_path / "run")
    tensors["random"] = torch.full_like(tensors["random"], 255)
    checkpoint.save_tensors(tmp_path / "run/training.safetensors", tensors, {"facts": json.dumps(facts)})
    with pytest.raises(
        ArtefactError, match=r"training\.safetensors holds a random state that PyTorch does not accept"
    ):
        resume(tmp_path / "run", progress=False)


@pytest.mark.parametrize("name", ["model.blocks.0.key.weight", "exp_avg.blocks.0.key.weight", "memory.1"])
def test_a_checkpoint_that_is_not_finite_is_refused(make_config: Make, tmp_path: Path, name: str) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    tensors, facts = state(tmp_path / "run")
    tensors[name].view(-1)[3] = torch.inf
    checkpoint.save_tensors(tmp_path / "run/training.safetensors", tensors, {"facts": json.dumps(facts)})
    with pytest.raises(
        ArtefactError, match=rf"training\.safetensors cannot be used, because {name} holds inf"
    ):
        resume(tmp_path / "run", progress=False)


def test_the_best_model_is_needed_to_go_on_where_it_is_older_than_the_checkpoint(
    make_config: Make, tmp_path: Path
) -> None:
    train_until(make_config(), tmp_path / "run", 17)
    best = (tmp_path / "run/model.safetensors").read_bytes()
    assert checkpoint.load_metadata(tmp_path / "run/model.safetensors") == {"step": "10"}
    other = train(make_config(steps=4), tmp_path / "other", progress=False)
    (tmp_path / "run/model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(
        ArtefactError, match=r"model\.safetensors does not hold the weights of step 10, the best of this run"
    ):
        resume(tmp_path / "run", progress=False)
    (tmp_path / "run/model.safetensors").write_bytes(best[:-1] + bytes([best[-1] ^ 1]))
    with pytest.raises(ArtefactError, match=r"model\.safetensors was altered: the SHA-256"):
        resume(tmp_path / "run", progress=False)
    (tmp_path / "run/model.safetensors").write_bytes(best)
    resume(tmp_path / "run", progress=False)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "not safetensors", "another model's"])
def test_a_damaged_state_is_refused_and_named(make_config: Make, tmp_path: Path, damage: str) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    path = tmp_path / "run/training.safetensors"
    if damage == "another model's":
        train_until(make_config(layers=1), tmp_path / "other", 1)
        path.write_bytes((tmp_path / "other/training.safetensors").read_bytes())
    else:
        data = path.read_bytes()
        path.write_bytes(
            {"truncated": data[: len(data) // 2], "emptied": b"", "not safetensors": b"x" * 500}[damage]
        )
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(ArtefactError, match=r"training\.safetensors"):
        resume(tmp_path / "run", progress=False)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_text_that_changed_since_is_refused(make_config: Make, tmp_path: Path, text_file: Path) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    text_file.write_text(text_file.read_text().replace("gradient", "gradieny"))
    with pytest.raises(ConfigError, match=r"text that .*run was trained on has changed since"):
        resume(tmp_path / "run", progress=False)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    source = make_source(tmp_path / "in", "penn-treebank", "tar.gz")
    prepare("penn-treebank", source, tmp_path / "ptb", unverified=True, progress=False)
    return tmp_path / "ptb"


@pytest.mark.parametrize(("split", "what"), [("train", "trained"), ("valid", "validated")])
def test_a_dataset_that_changed_since_is_refused(
    make_config: Make, tmp_path: Path, dataset: Path, split: str, what: str
) -> None:
    config = make_config(text=None, data=str(dataset), batch=1, training=MemoryRule(mem_len=2, segment=2))
    train_until(config, tmp_path / "run", 7)
    ids = bytearray((dataset / f"{split}.bin").read_bytes())
    ids[0] = 1 - min(ids[0], 1)
    (dataset / f"{split}.bin").write_bytes(ids)
    with pytest.raises(ConfigError, match=rf"text that .*run was {what} on has changed since"):
        resume(tmp_path / "run", progress=False)


def test_a_checkpoint_of_before_held_out_texts_were_hashed_resumes(make_config: Make, tmp_path: Path) -> None:
    whole = train(make_config(), tmp_path / "whole", progress=False)
    train_until(make_config(), tmp_path / "run", 7)
    tensors, facts = state(tmp_path / "run")
    older = facts | {"text": facts["text"].partition("-")[0]}
    checkpoint.save_tensors(tmp_path / "run/training.safetensors", tensors, {"facts": json.dumps(older)})
    assert_same_run(resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("missing", ["training.safetensors", "config.json", "vocab.json", "valid.txt"])
def test_a_missing_file_is_named(make_config: Make, tmp_path: Path, missing: str) -> None:
    train_until(make_config(), tmp_path / "run", 7)
    (tmp_path / "run" / missing).unlink()
    with pytest.raises(UserError, match=missing):
        resume(tmp_path / "run", progress=False)
