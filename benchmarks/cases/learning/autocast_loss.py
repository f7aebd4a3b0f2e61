"""What bf16 autocast costs in loss: pairs of short trainings that differ in nothing but their precision.

Both trainings of a pair start from the same weights, see the same text in the same order, and take the same
number of steps. The model is the first of `architectures`. Both are scored on the same held-out text, in
fp32. Rounding grows during training until the two are as far apart as two seeds. So one pair says little: the
answer is the mean difference of many pairs, with its interval. At the learning rate of `architectures`
(0.002) pairs differ by 0.02 bits after 300 steps, and hundreds of them would be needed. A smaller rate is
taken here, which is still twice that of the published recipe for enwik8.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases.learning import architectures
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Limits
from benchmarks.tables.autocast_loss import lines
from runtimes.base.records import to_json
from runtimes.tasks.evaluate import evaluate
from trainer.data.source import load_source, with_vocab_size
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.run.session import TorchSession
from trainer.training.state import Training

MODEL = "Transformer-XL"
STEPS, RATE, LANES = 1000, 5e-4, 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair. fp32, bf16: held-out bits per byte after the steps, segment by segment under the rule of
    training. text: its name, size and SHA-256. recipe: the whole configuration of the run in fp32.
    """

    seed: int
    steps: int
    fp32: float
    bf16: float
    text: dict[str, Any]
    recipe: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def run(
    *,
    threads: int,
    text: Path | None = None,
    seeds: int = 2,
    before: Sequence[dict[str, Any]] = (),
    keep: Callable[[Row], object] = lambda row: None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each seed. text, before and keep: as in `architectures`."""
    architectures.check(architectures.recipe(MODEL, threads=threads))
    rows = []
    with architectures.plain_text(text) as (path, facts):
        for seed in range(seeds):
            config = _recipe(seed, threads)
            recipe = json.loads(json.dumps(to_json(config)))  # as it is read from the history
            known = [row for row in before if (row["text"], row["recipe"]) == (facts, recipe)]
            if known:
                rows.append(Row(**known[-1]))
                continue
            config = dataclasses.replace(config, text=path)
            fp32, bf16 = _bits(config), _bits(dataclasses.replace(config, autocast="bf16"))
            row = Row(seed=seed, steps=config.steps, fp32=fp32, bf16=bf16, text=facts, recipe=recipe)
            keep(row)
            rows.append(row)
            progress(f"seed {seed}: {fp32:.4f} bits per byte in fp32, {bf16:.4f} in bf16")
    return rows


def _recipe(seed: int, threads: int) -> TrainConfig:
    config = architectures.recipe(MODEL, threads=threads, seed=seed)
    return dataclasses.replace(config, optimizer=OptimizerConfig(lr=RATE)).with_steps(STEPS)


def _bits(config: TrainConfig) -> float:
    """Held-out bits per byte after all steps."""
    source = load_source(config)
    training = Training.start(with_vocab_size(config, source.vocab))
    for _ in range(config.steps):
        training.advance(source.tokens)
    training.refuse_not_finite()
    session = TorchSession(training.model.eval(), source.vocab, config.training, identity="autocast-loss")
    return evaluate(session, architectures.test_tokens(source), lanes=LANES).bits_per_token


def table(rows: Sequence[Row], limits: Limits | None = None) -> list[str]:
    """The rows as lines of a markdown table."""
    return lines([row.to_json() for row in rows])


def described() -> BenchmarkConfig:
    """The sizes of the model, for the history."""
    return dataclasses.replace(architectures.described(), name="a small model")
