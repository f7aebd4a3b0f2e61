"""What bf16 autocast costs in loss: pairs of short trainings that differ in nothing but their precision.

Both trainings of a pair start from the same weights, see the same text in the same order, and take the same
number of steps. The model is the first of `architectures`. Both are scored on the same held-out text, in
fp32. Rounding grows during training until the two are as far apart as two seeds. So one pair says little: the
answer is the mean difference of many pairs, with its interval. At the learning rate of `architectures`
(0.002) pairs differ by 0.02 bits after 300 steps, and hundreds of them would be needed. This case uses a
smaller rate, still twice the rate of the published recipe for enwik8.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.case import Case, Column, Job, Line
from benchmarks.cases.learning import architectures
from benchmarks.runs import Figures, History, Run
from runtimes.base.records import to_json
from runtimes.tasks.evaluate import evaluate
from trainer.data.source import load_source, with_vocab_size
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.run.session import TorchSession
from trainer.training.state import Training

MODEL = "Transformer-XL"
STEPS = 1000
RATE = 5e-4
LANES = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair."""

    seed: int
    steps: int
    #: Held-out bits per byte after the steps, segment by segment under the rule of training.
    fp32: float
    bf16: float
    #: Its name, size and SHA-256.
    text: dict[str, Any]
    #: The whole configuration of the run in fp32.
    recipe: dict[str, Any]


def run(job: Job) -> Iterator[Row]:
    """A row for each seed."""
    architectures.check(architectures.recipe(MODEL, threads=job.threads))
    with architectures.plain_text(job["text"]) as (path, facts):
        for seed in range(job["seeds"]):
            config = _recipe(seed, job.threads)
            recipe = json.loads(json.dumps(to_json(config)))  # as it is read from the history
            known = [row for row in job.earlier if (row["text"], row["recipe"]) == (facts, recipe)]
            if known:
                yield Row(**known[-1])
                continue
            config = dataclasses.replace(config, text=path)
            fp32 = _bits(config)
            bf16 = _bits(dataclasses.replace(config, autocast="bf16"))
            row = Row(seed=seed, steps=config.steps, fp32=fp32, bf16=bf16, text=facts, recipe=recipe)
            job.keep(row)
            job.progress(f"seed {seed}: {fp32:.4f} bits per byte in fp32, {bf16:.4f} in bf16")
            yield row


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
    session = TorchSession(training.model.eval(), source.vocab, config.training, weights="autocast-loss")
    return evaluate(session, architectures.test_tokens(source), lanes=LANES).bits_per_token


TARGET = 0.005  # bits per byte: the largest difference with which bf16 is recommended
# The 97.5 % points of Student's t for 1 to 30 degrees of freedom. For more the last one is a little large.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def published(history: History) -> list[Run]:
    """All pairs that share the newest one's text and recipe. The machine's load changes no loss."""
    runs = history.of("autocast-loss")
    pairs = {run.rows[0]["seed"]: run for run in runs if _shared(run.rows[0]) == _shared(runs[-1].rows[0])}
    return [pairs[seed] for seed in sorted(pairs)]


def _shared(row: Figures) -> tuple[object, ...]:
    recipe = {name: value for name, value in row["recipe"].items() if name != "seed"}
    return row["text"], recipe


def summarized(lines: list[Line]) -> list[Line]:
    """One line: the means of both precisions, and their difference next to the target."""
    rows = [row for row, _ in lines]
    differences = [row["bf16"] - row["fp32"] for row in rows]
    means = {side: mean(row[side] for row in rows) for side in ("fp32", "bf16")}
    found = {"pairs": len(rows), "half": half_interval(differences), "differences": differences}
    return [Line({**rows[0], **means, **found}, lines[0].run)]


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of some values, by Student's t; infinite for a single value."""
    free = len(values) - 1
    if not free:
        return math.inf
    return STUDENT[min(free, len(STUDENT)) - 1] * stdev(values) / math.sqrt(len(values))


def _difference(row: Figures, run: Run) -> str:
    half = row["half"]
    return f"{mean(row['differences']):+.4f}" + ("" if math.isinf(half) else f" ± {half:.4f}")


def _shown(row: Figures, run: Run) -> str:
    return "yes" if abs(mean(row["differences"])) + row["half"] <= TARGET else "**not shown**"


CASE = Case(
    name="autocast-loss",
    run=run,
    keys=("seed", "steps"),
    columns=(
        Column("pairs", "pairs"),
        Column("steps", "steps"),
        Column("fp32", "fp32", ".4f"),
        Column("bf16", "bf16", ".4f"),
        Column("bf16 less fp32", _difference),
        Column("smallest", lambda row, run: f"{min(row['differences']):+.4f}"),
        Column("largest", lambda row, run: f"{max(row['differences']):+.4f}"),
        Column(f"within {TARGET}", _shown),
    ),
    notes=lambda lines: [f"Text: {architectures.described_text(lines[0].row['text'])}."],
    summarized=summarized,
    options=(architectures.text_option, architectures.seeds_option("Pairs of runs")),
    size=lambda options: dataclasses.replace(architectures.SIZE, name="a small model"),
    published=published,
    resumable=True,
    engine="torch",
)
