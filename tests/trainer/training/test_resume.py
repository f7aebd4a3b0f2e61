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
from tests.trainer.training.runs import assert_same_run, state, train_until
from trainer.run.config import Averaging, TrainConfig
from trainer.training.loop import resume, train

Make = Callable[..., TrainConfig]
Trained = Callable[[TrainConfig], Path]
Stopped = Callable[[TrainConfig, int], Path]
LENGTHS = {"mem_len_schedule": ((3, 12), (7, 4), (9, 20)), "segment_schedule": ((5, 3), (8, 11))}
DROPPED = {"dropout": 0.2, "attention_dropout": 0.1, "sample_tokens": 3}

# Changes of a run, and the step before which it is stopped. By default some runs have many parts at once;
# the rows with each of them alone are slow.
KINDS: list[tuple[dict[str, Any], int]] = [
    (DROPPED | LENGTHS | {"optimizer": "adagrad", "accumulate": 2, "autocast": "fp16"}, 8),
    (
        {
            "optimizer": "muon",
            "weight_decay": 0.1,
            "betas": (0.8, 0.95),
            "averaging": Averaging(start_step=5),
            "vocab": "subword",
            "max_size": 280,
            "schedule": "inverse-sqrt",
        },
        9,
    ),
    (
        {
            "batch": 90,  # wraps around after four steps
            "pre_norm": True,
            "tie_biases": False,
            "autocast": "bf16",
            "schedule": "plateau",
            "validate_every": 1,
            "averaging": Averaging(patience=0),
            "lr": 0.3,
        },
        5,
    ),
    (DROPPED | {"training": MemoryRule(mem_len=20, segment=3, initial_memory="zeros", clamp_len=4)}, 0),
]
ALONE: list[tuple[dict[str, Any], int]] = [
    *((DROPPED, stop) for stop in (4, 5, 6, 11)),
    ({"training": MemoryRule(mem_len=0, segment=8), "batch": 1}, 8),
    ({"autocast": "fp16", "averaging": Averaging(start_step=9)}, 8),
    (LENGTHS, 8),
    ({"patience": 4, "validate_every": 1, "lr": 0.3, "checkpoint_every": 3}, 8),
]


@pytest.mark.parametrize(
    ("changes", "stop"), [*KINDS, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALONE)]
)
def test_a_stopped_run_resumes_to_the_same_bits(
    make_config: Make, trained: Trained, stopped: Stopped, changes: dict[str, Any], stop: int
) -> None:
    config = make_config(steps=12, **changes)
    run = stopped(config, stop)
    regular = stop // config.checkpoint_every * config.checkpoint_every
    assert regular <= state(run)[1]["step"] <= stop, "a better validation is a checkpoint too"
    torch.manual_seed(99)  # another process would not have this one's random state
    assert_same_run(resume(run, progress=False), trained(config))


# States are written at steps 0, 5, 10, 15 and 20, models at 0, 5, and the best validations, 10 and 20.
@pytest.mark.parametrize(
    ("half", "number"),
    every(
        2,
        [
            ("training.safetensors", 3),
            ("model.safetensors", 3),
            ("model.safetensors", 4),
            ("training.safetensors", 5),
        ],
    ),
)
def test_a_stop_between_the_files_of_a_checkpoint_resumes(
    make_config: Make,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    half: str,
    number: int,
) -> None:
    saves, save = [], snapshot.save_tensors

    def stopping(path: Path, *arguments: Any) -> None:
        saves.append(path.name)
        if path.name == half and saves.count(half) == number:
            raise KeyboardInterrupt
        save(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_tensors", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(), tmp_path / "stopped", progress=False)
    assert_same_run(resume(tmp_path / "stopped", progress=False), trained(make_config()))


def test_lines_after_the_checkpoint_are_dropped(
    make_config: Make, trained: Trained, stopped: Stopped
) -> None:
    run = stopped(make_config(), 7)
    with open(run / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"step": 9, "loss_nats": 9.9}\n' + 5000 * b"[" + b'\n\xff\x00\n{"step": 10, "loss_n')
    assert_same_run(resume(run, progress=False), trained(make_config()))


def test_a_run_with_a_relative_text_resumes_from_another_folder(
    make_config: Make, tmp_path: Path, plain_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").write_text(plain_text)  # also the name of a kind of vocabulary
    train_until(make_config(text="word", steps=8), tmp_path / "run", 6)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(tmp_path / "run", progress=False)
    assert state(tmp_path / "run")[1]["step"] == 8


def rewrite(run: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any] | None) -> None:
    text = "{" if facts is None else json.dumps(facts)
    checkpoint.save_tensors(run / "training.safetensors", tensors, {"facts": text})


def test_the_scale_of_the_loss_is_resumed(make_config: Make, stopped: Stopped) -> None:
    run = stopped(make_config(autocast="fp16"), 7)
    tensors, facts = state(run)
    assert facts["step"] == 5
    assert facts["scale"] in (2.0**16, 2.0**15), "the first scale, or half of it after a step out of range"
    rewrite(run, tensors, facts | {"scale": 2.0**9, "scale_steps": 1990})
    facts = state(resume(run, progress=False))[1]
    assert (facts["scale"], facts["scale_steps"]) == (2.0**10, 5), "it doubles after 2000 steps in range"


def test_a_run_of_another_kind_of_device_is_resumed(make_config: Make, stopped: Stopped) -> None:
    run = stopped(make_config(), 7)
    tensors, facts = state(run)
    rewrite(run, tensors | {"random": torch.zeros(1, 16, dtype=torch.uint8)}, facts)  # as on `cuda`
    assert state(resume(run, progress=False))[1]["step"] == make_config().steps


def with_facts(change: dict[str, Any] | None) -> Callable[[Path], None]:
    def altered(run: Path) -> None:
        tensors, facts = state(run)
        rewrite(run, tensors, None if change is None else facts | change)

    return altered


def with_tensor(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    def altered(run: Path) -> None:
        tensors, facts = state(run)
        change(tensors[name].view(-1))
        rewrite(run, tensors, facts)

    return altered


def with_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def altered(run: Path) -> None:
        (run / name).write_bytes(change((run / name).read_bytes()))

    return altered


def flipped(data: bytes) -> bytes:
    """With one bit of its last tensor changed."""
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


NO_FACTS = r"training\.safetensors (does not say|was written at)"
REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (with_facts({"step": 21}), NO_FACTS),
    (with_facts({"at": -1}), NO_FACTS),
    (with_facts({"ranks": 0}), NO_FACTS),
    (with_facts({"position": 1 << 60}), NO_FACTS),
    (with_facts({"scale": 0.0}), NO_FACTS),
    (with_facts({"validations": [{"step": 1}]}), NO_FACTS),
    (with_facts(None), NO_FACTS),
    (with_tensor("random", lambda x: x.fill_(255)), "holds a random state that PyTorch does not accept"),
    (
        with_tensor("memory.1", lambda x: x[3:4].fill_(torch.inf)),
        "because memory.1 holds inf",
    ),
    (with_file("training.safetensors", lambda data: data[: len(data) // 2]), r"training\.safetensors"),
    (with_file("training.safetensors", flipped), r"training\.safetensors was altered: the SHA-256"),
    *(
        (lambda run, name=name: (run / name).unlink(), name)  # type: ignore[misc]
        for name in ("training.safetensors", "config.json", "vocab.json")
    ),
]


@pytest.mark.parametrize(("damage", "words"), REFUSED)
def test_a_damaged_run_is_refused_and_not_changed(
    make_config: Make, stopped: Stopped, damage: Callable[[Path], None], words: str
) -> None:
    run = stopped(make_config(), 7)
    damage(run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UserError, match=words) as caught:
        resume(run, progress=False)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_the_best_model_is_needed_to_resume(make_config: Make, trained: Trained, stopped: Stopped) -> None:
    run = stopped(make_config(), 17)
    best = (run / "model.safetensors").read_bytes()
    for other, words in (
        ((trained(make_config(steps=12)) / "model.safetensors").read_bytes(), "not hold the weights of step"),
        (flipped(best), r"model\.safetensors was altered: the SHA-256"),
    ):
        (run / "model.safetensors").write_bytes(other)
        with pytest.raises(ArtefactError, match=words):
            resume(run, progress=False)
    (run / "model.safetensors").write_bytes(best)
    resume(run, progress=False)


def test_a_text_that_changed_since_is_refused(make_config: Make, tmp_path: Path, plain_text: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(plain_text)
    train_until(make_config(text=str(text)), tmp_path / "run", 1)
    text.write_text(plain_text.replace("gradient", "gradieny"))
    with pytest.raises(ConfigError, match=r"text that .*run was trained on has changed since"):
        resume(tmp_path / "run", progress=False)


def test_a_dataset_that_changed_since_is_refused(make_config: Make, dataset: Path, tmp_path: Path) -> None:
    rule = MemoryRule(mem_len=2, segment=2)
    train_until(make_config(text=None, data=str(dataset), batch=1, training=rule), tmp_path / "run", 1)
    for split, what in (("train", "trained"), ("valid", "validated")):
        part = dataset / f"{split}.bin"
        whole = part.read_bytes()
        part.write_bytes(bytes([1 - min(whole[0], 1)]) + whole[1:])
        with pytest.raises(ConfigError, match=rf"text that .*run was {what} on has changed since"):
            resume(tmp_path / "run", progress=False)
        part.write_bytes(whole)
