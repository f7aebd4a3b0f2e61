"""What `xl-export train --text` chooses without a configuration, and what fine-tuning keeps of its run."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtimes.base.errors import ConfigError, TextError
from runtimes.contract.sampling import Sampler, read_sampling, write_sampling
from runtimes.contract.vocabulary import load_vocab
from tests.clock import set_clock
from tests.commands import xl
from tests.trainer.training.runs import assert_same_run, lines_of, stop_at
from trainer.data.own import OwnFiles
from trainer.data.own_ids import ids_vocab, prepare_ids
from trainer.model.model import count_parameters
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training import loop
from trainer.training import plan as planning
from trainer.training.loop import resume, train
from trainer.training.plan import SIZES, STEPS_SHARE, TEXTS, VALIDATIONS, plan, plan_tuning
from trainer.training.schedule import learning_rate

Make = Callable[..., TrainConfig]


def written(folder: Path, num_bytes: int) -> str:
    line = b"the cat sat on the mat and looked at the other cats. "
    (folder / "text.txt").write_bytes((line * (num_bytes // len(line) + 1))[:num_bytes])
    return str(folder / "text.txt")


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`speed(1e6)`: the tokens per second that the plan then measures."""
    return lambda rate: monkeypatch.setattr(planning, "tokens_per_second", lambda config: rate)


def test_more_time_and_more_text_make_larger_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "tokens_per_second", lambda config: 1e10 / count_parameters(config.model))

    def parameters(num_bytes: int, minutes: float) -> int:
        config, _ = plan(text=written(tmp_path, num_bytes), minutes=minutes)
        return config.model.layers * config.model.d_model**2

    table = [[parameters(size, minutes) for minutes in (1, 20, 480)] for size in (20_000, 200_000, 5_000_000)]
    assert all(row == sorted(row) for row in table)
    assert table[0][0] < table[1][1] < table[2][2]


def test_steps_fit_the_time(tmp_path: Path, speed: Callable[[float], None]) -> None:
    speed(1000)
    config, paragraph = plan(text=written(tmp_path, 5_000_000), minutes=20)
    trained = config.steps * config.batch * config.training.segment
    assert trained == pytest.approx(1000 * 60 * 20 * STEPS_SHARE, rel=0.05)
    assert 0 < config.schedule.warmup_steps < config.steps
    assert config.steps / config.validate_every == pytest.approx(VALIDATIONS, rel=0.3)
    assert "about 20 minutes" in paragraph
    assert "More time would help" in paragraph


def test_a_small_text_is_not_read_for_ever(tmp_path: Path, speed: Callable[[float], None]) -> None:
    speed(1e6)
    config, paragraph = plan(text=written(tmp_path, 100_000), minutes=600)
    tokens = 0.9 * 100_000 / TEXTS[1].bytes_per_token
    assert config.steps * config.batch * config.training.segment <= TEXTS[1].passes * tokens
    assert "More data would help" in paragraph


@pytest.mark.parametrize(
    ("text", "library", "vocab"),
    [
        ("the cat sat on the mat. " * 400, True, "char"),
        ("the cat sat on the mat. " * 4000, True, "subword"),
        ("the cat sat on the mat. " * 4000, False, "char"),
        ("".join(map(chr, range(0x4E00, 0x4E00 + 1500))), True, "byte"),
    ],
    ids=["short", "long", "long, without the library", "of thousands of symbols"],
)
def test_text_and_library_decide_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: Any, text: str, library: bool, vocab: str
) -> None:
    speed(1000)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: library or None)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert plan(text=str(tmp_path / "text.txt"), minutes=1)[0].vocab == vocab


def test_train_plans_a_text_without_a_configuration(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MEASURING_SECONDS", 0.01)
    result = xl(f"train --text {text_file} --minutes 0.1 --set steps=4 --out {tmp_path}/run")
    assert result.exit_code == 0, result.output
    assert "The plan: characters as tokens; 2 layers of 64" in result.stdout
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stored["vocab"], stored["steps"]) == ("char", 4)
    assert read_sampling(tmp_path / "run").temperature == 0.8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"too short. " * 10, "has 110 bytes; give a text of at least a few thousand characters"),
        ("Größe und Maß. ".encode("latin-1") * 200, "line 1 of .* is not UTF-8 .* probably Latin-1"),
    ],
)
def test_a_useless_text_is_refused_before_anything_is_measured(
    text: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(planning, "tokens_per_second")
    (tmp_path / "text.txt").write_bytes(text)
    with pytest.raises(TextError, match=sentence):
        plan(text=str(tmp_path / "text.txt"), minutes=1)


@pytest.mark.parametrize(("tokens", "largest"), [(3_000, 0), (200_000, 2)])
def test_a_dataset_is_planned_by_its_tokens(
    tokens: int, largest: int, speed: Callable[[float], None], tmp_path: Path
) -> None:
    speed(1e6)
    np.save(tmp_path / "ids.npy", np.arange(tokens) % 372)
    vocab = ids_vocab(372, names=None, end_of_document=None)
    files = OwnFiles(train=[tmp_path / "ids.npy"])
    prepare_ids(files, tmp_path / "data", vocab=vocab)
    config, paragraph = plan(data=str(tmp_path / "data"), minutes=600)
    assert (config.data, config.text) == (str(tmp_path / "data"), None)
    assert config.model.d_model == SIZES[largest].d_model
    assert "a vocabulary of 372. The plan: " in paragraph
    assert "Expect" not in paragraph  # sentences, of ids
    assert config.sampling.top_p == 1  # a rare end is drawn too


@pytest.fixture
def first(make_config: Make, trained: Callable[[TrainConfig], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained(make_config(steps=4)), tmp_path / "first"))


def test_tuning_starts_from_the_best_weights(
    first: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first / "training.safetensors").unlink()  # as in a run that was imported
    write_sampling(first, Sampler(temperature=0.5, top_p=0.7))
    config, paragraph = plan_tuning(first, text=str(text_file), minutes=1, steps=3)
    assert config.optimizer.lr == pytest.approx(0.3 * load_run(first).config.optimizer.lr)
    assert "The optimiser starts fresh" in paragraph
    monkeypatch.setattr(loop, "_continue", lambda *_, **__: None)
    run = loop.train(config, tmp_path / "second", progress=False)  # its checkpoint of step 0
    before = load_file(first / "model.safetensors")
    after = load_file(run / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert read_sampling(run) == load_run(run).config.sampling == Sampler(temperature=0.5, top_p=0.7)
    assert load_vocab(run / "vocab.json").to_json() == load_vocab(first / "vocab.json").to_json()


def test_a_tuned_run_resumes_without_the_run_it_started_from(
    first: Path, text_file: Path, tmp_path: Path
) -> None:
    config, _ = plan_tuning(first, text=str(text_file), minutes=1, steps=3)
    run = train(config, tmp_path / "second", progress=False)
    first_score = next(line for line in lines_of(run) if "validation_bits_per_token" in line)
    assert first_score["step"] == 0, "what it has to beat"
    first.rename(tmp_path / "moved")
    resume(run, steps=5, progress=False)
    assert lines_of(run)[-1]["step"] == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"d_model": 24}, "whose model sizes"), ({"vocab": "byte"}, r"another vocabulary \(256 tokens\)")],
)
def test_weights_of_another_model_are_refused(
    first: Path, make_config: Make, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loop.train(make_config(start_from=str(first), **changes), tmp_path / "second", progress=False)
    assert not (tmp_path / "second").exists()


def test_a_machine_that_becomes_slower_gets_fewer_steps(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=20, checkpoint_every=5, validate_every=5)

    def slowly(name: str) -> Path:
        times = iter([0, 60, 130])  # five steps take one of two minutes
        set_clock(monkeypatch, loop, monotonic=lambda: next(times))
        return train(config, tmp_path / name, minutes=2, progress=False)

    run = slowly("run")
    assert load_run(run).config.steps == 10
    assert [line["step"] for line in lines_of(run)][-1] == 10
    rates = {line["step"]: line["learning_rate"] for line in lines_of(run) if "learning_rate" in line}
    assert rates[10] == pytest.approx(learning_rate(load_run(run).config, 9))
    with monkeypatch.context() as stopped:
        stop_at(stopped, 7)
        with pytest.raises(KeyboardInterrupt):
            slowly("stopped")
    assert_same_run(resume(tmp_path / "stopped", progress=False), run)
    config = make_config(steps=20, checkpoint_every=5, warmup_steps=12)
    assert load_run(slowly("warm-up")).config.steps == 20
