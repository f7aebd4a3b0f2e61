"""What to train: the model's sizes, the text, and the recipe. One JSON file in, the same JSON in the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtimes.errors import ConfigError
from runtimes.files import read_json
from runtimes.machine import memory_bytes
from runtimes.records import from_json
from runtimes.rule import MemoryRule
from trainer.model_config import ModelConfig

BUILT_IN = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    vocab: tokens are bytes, characters or words (of at least `min_count` occurrences).
    text: path of a text file; null for the built-in corpus. batch: lanes (B), each a contiguous part of the text.
    training, evaluation: memory rules while training and for every score afterwards.
    learning_rate rises linearly over `warmup_steps`, then falls by a cosine to 0 at `steps`.
    clip: largest gradient norm. threads: CPU threads, 0 for PyTorch's choice.
    """

    model: ModelConfig
    training: MemoryRule
    evaluation: MemoryRule
    vocab: Literal["byte", "char", "word"] = "char"
    min_count: int = 1
    text: str | None = None
    batch: int = 16
    steps: int = 1000
    learning_rate: float = 2.5e-4
    warmup_steps: int = 0
    clip: float = 0.25
    seed: int = 0
    log_every: int = 20
    validate_every: int = 200
    checkpoint_every: int = 100
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("min_count", "batch", "steps", "log_every", "validate_every", "checkpoint_every"):
            if not 1 <= getattr(self, name) <= 1 << 40:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive number.")
        if self.learning_rate <= 0 or self.clip <= 0:
            raise ConfigError(f"learning_rate is {self.learning_rate} and clip {self.clip}; expected positive numbers.")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; expected 0 to steps, {self.steps}.")
        if not 0 <= self.seed < 1 << 63 or not 0 <= self.threads <= 1024:
            raise ConfigError(f"seed is {self.seed} and threads {self.threads}; expected seed ≥ 0 and threads 0 to 1024.")

    def refuse_if_too_large(self) -> None:
        """Raises ConfigError where training takes more memory than this machine has."""
        if self.num_bytes > memory_bytes():
            raise ConfigError(
                f"training {self.model.parameters:,} parameters in {self.batch} lanes takes {self.num_bytes / 2**30:,.0f} GiB "
                f"and this machine has {memory_bytes() / 2**30:.0f}; reduce layers, d_model, d_ff, batch, segment or mem_len."
            )

    @property
    def num_bytes(self) -> int:
        """About what training takes: weights, gradients and Adam's moments, and what the backward pass keeps."""
        model, T = self.model, max(self.training.segment, self.evaluation.segment)
        J = max(self.training.slots, self.evaluation.slots)
        scores = self.batch * model.heads * T * J
        activations = self.batch * (J + 6 * T) * model.d_model + self.batch * T * 2 * model.d_ff + J * model.d_model
        logits = self.batch * T * model.vocab_size
        return 16 * model.parameters + 4 * (model.layers * (2 * scores + activations) + 2 * logits)

    def with_steps(self, steps: int) -> TrainConfig:
        """The same recipe over this many steps, its warm-up no longer than that."""
        return dataclasses.replace(self, steps=steps, warmup_steps=min(self.warmup_steps, steps))

    @classmethod
    def load(cls, name: str | Path) -> TrainConfig:
        """The configuration in a JSON file, or a built-in one by name (`demo`, `tiny`, …)."""
        path = BUILT_IN / f"{name}.json"
        if not path.is_file():
            path = Path(name)
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in BUILT_IN.glob("*.json")))
            raise ConfigError(f"{name} is neither a file nor a built-in configuration; the built-in ones are {known}.")
        return from_json(cls, read_json(path), where=str(path))
