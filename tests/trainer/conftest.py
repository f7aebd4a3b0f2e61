"""A text that never changes, a configuration that trains in a second, and one PyTorch thread."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.contract.rule import MemoryRule
from tests.trainer.data.corpus_files import make_source
from tests.trainer.training.runs import train_until
from trainer.data.prepare import prepare
from trainer.data.source import load_source, with_vocab_size
from trainer.model.config import ModelConfig
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig, ScheduleConfig
from trainer.training.loop import train
from trainer.training.state import Training

SENTENCE = (
    "the memory of a segment is read by the next one and no gradient flows into it while rows keep their "
    "own place"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are fastest on one thread, and training sets the number for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def plain_text() -> str:
    """4,000 characters: words drawn by a small generator that is the same on every machine."""
    words, text, state = SENTENCE.split(), "", 1
    while len(text) < 4000:
        state = (state * 1103515245 + 12345) % 2**31
        text += words[(state >> 16) % len(words)] + (".\n" if state >> 20 & 7 == 0 else " ")
    return text[:4000]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory, plain_text: str) -> Path:
    """That text. Tests must not change it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(plain_text, encoding="utf-8")
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of words for the test to change, which has a few sentences of Penn Treebank."""
    source = make_source(tmp_path / "in", "penn-treebank", "tar.gz")
    prepare("penn-treebank", source, tmp_path / "ptb", unverified=True)
    return tmp_path / "ptb"


@pytest.fixture(scope="session")
def make_config(text_file: Path) -> Callable[..., TrainConfig]:
    """`make_config(steps=…, dropout=…, lr=…)`: a tiny run on the plain text.

    Keys of the model, the optimiser and the schedule are given flat, and `optimizer` and `schedule` as kinds.
    """

    def make(**changes: Any) -> TrainConfig:
        flat: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24, "lr": 0.01}
        flat |= {"warmup_steps": min(3, changes.get("steps", 20))} | changes

        def section(cls: type[Any], kind: str = "") -> Any:
            taken = {name: flat.pop(name) for name in [*flat] if name in cls.__dataclass_fields__}
            return cls(**taken, **({"kind": flat.pop(kind)} if kind in flat else {}))

        model = section(ModelConfig)
        optimizer = section(OptimizerConfig, "optimizer")
        schedule = section(ScheduleConfig, "schedule")
        settings: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "training": MemoryRule(mem_len=8, segment=8, mask="full"),
            "evaluation": MemoryRule(mem_len=12, segment=8),
            "text": str(text_file),
            "batch": 4,
            "steps": 20,
            "log_every": 1,
            "validate_every": 10,
            "checkpoint_every": 5,
            "sample_tokens": 0,
            "peak_tflops": 1.0,
            "threads": 1,
        }
        return TrainConfig(**settings | flat)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(config, stop=None)`: the run of a configuration until its end or before a step, made once.

    Tests must not change it.
    """
    done: dict[str, Path] = {}

    def run_of(config: TrainConfig, stop: int | None = None) -> Path:
        key = repr((config, stop))
        if key not in done:
            out = tmp_path_factory.mktemp("trained") / "run"
            if stop is None:
                train(config, out, progress=False)
            else:
                train_until(config, out, stop)
            done[key] = out
        return done[key]

    return run_of


@pytest.fixture
def stopped(trained: Callable[..., Path], tmp_path: Path) -> Callable[[TrainConfig, int | None], Path]:
    """`stopped(config, step)`: a run of its own for the test, stopped before a step or trained to its end."""
    return lambda config, step: Path(shutil.copytree(trained(config, step), tmp_path / "stopped"))


@pytest.fixture
def started() -> Callable[[TrainConfig], tuple[Training, np.ndarray]]:
    """`started(config)`: step 0 of a run, without its folder, and its tokens in lanes."""

    def start(config: TrainConfig) -> tuple[Training, np.ndarray]:
        source = load_source(config)
        return Training.start(with_vocab_size(config, source.vocab)), source.tokens

    return start
