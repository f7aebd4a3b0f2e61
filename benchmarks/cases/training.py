"""A training step in PyTorch: what memory costs, what bf16 and spans save, and the papers' public code.

The public code is no part of this project. Its folders are options; without them this project is compared
with itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Column, Job, file_option
from benchmarks.cases.learning.architectures import check
from benchmarks.checked_sessions import agreed
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing, take_turns
from benchmarks.references import REFERENCE_HELP, code_folders, reference_step
from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.state import Training

COMPARED = 4  # optimiser steps
TOLERANCE = 2e-3  # nats by which their losses may differ
LEARNED_SPAN = 100  # tokens; spans that are learned are far shorter than the longest that is possible
Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side at one memory length."""

    mem_len: int
    batch: int
    #: The time of one trained token.
    token: Timing
    #: The time divided by fp32's without memory.
    ratio: float
    #: None for fp32 of this project.
    side: str | None = None
    #: How many times as fast as the public code; None if that is not measured.
    faster: float | None = None


def run(job: Job) -> list[Row]:
    """Rows with memory and without, in bf16, with spans, and of the public code of --reference."""
    config = job.config
    repeats = job.repeats(config.repeats)
    batch = config.training_batch
    folders = code_folders(job["references"] or ())
    if config.model.vocabulary.cutoffs and folders:
        raise ConfigError(
            f"{config.name} has an adaptive softmax, which is not compared; give --config small."
        )
    recipes = _recipes(config, job.threads)
    for name in ("fp32", "no memory", "spans"):
        job.progress(f"{name}: comparing the attention of training with the naive one")
        check(recipes[name])
    trainings = {name: _start(recipe) for name, recipe in recipes.items()}
    trainings["whole spans"].span_lengths.spans = []  # every key is computed
    sides: dict[str, Step] = {name: _stepper(training) for name, training in trainings.items()}
    for project, name in (("transformer-xl", "fp32"), ("adaptive-span", "spans")):
        if project in folders:
            folder = folders[project]
            public = "reference" if name == "fp32" else "reference spans"
            job.progress(f"{public}: comparing the losses of {COMPARED} steps from the same weights")
            _compare(_start(recipes[name]), project, folder)
            fresh = _start(recipes[name])
            sides[public] = reference_step(project, folder, fresh, _tokens(fresh))
    job.progress(f"timing {repeats} steps for each")
    timed = take_turns(sides, repeats=repeats)
    lengths = {name: _recipe_of(name, recipes).training.segment for name in sides}
    times = {name: timing.per(batch * lengths[name]) for name, timing in timed.items()}
    return [_row(name, times, recipes) for name in times]


def _recipes(config: BenchmarkConfig, threads: int) -> dict[str, TrainConfig]:
    """The recipes that are timed. Spans: two layers, a quarter of the size, the recipe of adaptive spans."""
    batch = config.training_batch
    T = config.segment
    S = 4 * config.mem_len
    rule = MemoryRule(mem_len=T, segment=T, mask="full")
    plain = TrainConfig(
        model=config.model, training=rule, evaluation=rule, vocab="byte", batch=batch, threads=threads
    )
    none = dataclasses.replace(rule, mem_len=0)
    share = min(1.0, LEARNED_SPAN / S)
    model = ModelConfig(
        layers=2,
        d_model=config.model.d_model,
        heads=config.model.heads,
        head_dim=config.model.head_dim,
        d_ff=config.model.d_ff or config.model.d_model,
        vocab_size=config.model.vocab_size,
        positions="learned",
        context=S + 1,
        span=SpanConfig(maximum=S, initial=share, penalty=5e-7, epsilon=1e-8),
        vocabulary=VocabularyConfig(tie_weights=False, scale=False),
        initialization="uniform-fan-in",
    )
    far = MemoryRule(mem_len=S, segment=4 * T, include_self=False, initial_memory="zeros")
    spans = dataclasses.replace(
        plain,
        model=model,
        training=far,
        evaluation=far,
        # At this rate spans stay where they are, so that all sides compute the same.
        optimizer=OptimizerConfig(kind="adagrad", lr=1e-5, clip=0.03),
    )
    return {
        "fp32": plain,
        "no memory": dataclasses.replace(plain, training=none, evaluation=none),
        "bf16": dataclasses.replace(plain, autocast="bf16"),
        "spans": spans,
        "whole spans": spans,
    }


def _recipe_of(side: str, recipes: dict[str, TrainConfig]) -> TrainConfig:
    """The recipe that a side trains; the public code trains the recipe of the side next to it."""
    return recipes[{"reference": "fp32", "reference spans": "spans"}.get(side, side)]


def _row(name: str, times: dict[str, Timing], recipes: dict[str, TrainConfig]) -> Row:
    recipe = _recipe_of(name, recipes)
    public = "reference spans" if "spans" in name else "reference"
    compared = public in times and name not in (public, "no memory")
    return Row(
        mem_len=recipe.training.mem_len,
        batch=recipe.batch,
        token=times[name],
        ratio=times[name].median / times["no memory"].median,
        side=None if name in ("fp32", "no memory") else name,
        faster=times[public].median / times[name].median if compared else None,
    )


def _compare(training: Training, project: str, folder: Path) -> None:
    """Raises ArtefactError where the public code and this project do not train alike."""
    tokens = _tokens(training)
    public = reference_step(project, folder, training, tokens)
    worst = max(abs(float(training.advance(tokens).nats) - public()) for _ in range(COMPARED))
    agreed(worst, TOLERANCE, f"the losses of {COMPARED} steps differ from the losses of the code in {folder}")


def _start(recipe: TrainConfig) -> Training:
    return Training.start(dataclasses.replace(recipe, steps=1 << 20))


def _stepper(training: Training) -> Step:
    tokens = _tokens(training)
    return lambda: float(training.advance(tokens).nats)


def _tokens(training: Training) -> np.ndarray:
    recipe = training.config
    shape = (recipe.batch, 64 * recipe.training.segment + 1)
    return np.random.default_rng(0).integers(0, recipe.model.vocab_size, shape)


SIDES = {
    None: "fp32",
    "bf16": "bf16",
    "spans": "learned spans of 100 tokens, 2 layers",
    "whole spans": "the same, with every key computed",
    "reference": "public code of Transformer-XL, fp32",
    "reference spans": "public code of adaptive spans, fp32",
}


CASE = Case(
    name="training",
    run=run,
    keys=("side", "mem_len"),
    columns=(
        Column("what is trained", lambda row, run: SIDES[row.get("side")]),
        Column("memory, tokens", "mem_len"),
        Column("ms per trained token", "token"),
        Column(
            "times the cost without memory", lambda row, run: "" if row.get("side") else f"{row['ratio']:.2f}"
        ),
        Column("times as fast as the public code", "faster", ".2f"),
    ),
    options=(
        "config",
        "repeats",
        file_option("--reference references", REFERENCE_HELP, multiple=True),
    ),
    published=lambda history: [history.newest("training", "enwik8-base")],
    engine="torch",
)
