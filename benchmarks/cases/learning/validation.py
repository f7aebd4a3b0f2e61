"""What validations cost: the time of a validated token divided by the time of a trained one.

`benchmarks.arithmetic.validation_share` counts multiply-adds. Softmax, copies and the starts of operators are
not among them, and they weigh more in a validation. So the cost of a token is measured here for small models
of the published shapes, and the share of a whole run by arithmetic is multiplied by what is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.arithmetic import training_multiply_adds, validation_multiply_adds, validation_share
from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    Job,
    decimal,
    milliseconds,
    only_option,
    repeats_option,
    words,
)
from benchmarks.cases.learning.architectures import check
from benchmarks.checked_sessions import agreed
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing, take_turns
from benchmarks.runs import Row as Figures
from benchmarks.runs import Run
from runtimes.contract.vocabulary import IdsVocab
from runtimes.tasks.evaluate import evaluate
from trainer.run.config import TrainConfig
from trainer.run.overrides import with_overrides
from trainer.run.session import TorchSession
from trainer.training.state import Training
from trainer.training.validation import validate

REPEATS = 15  # timed calls of each side
SEGMENTS = 4  # of each lane in one validation
TOLERANCE = 1e-4  # bits per token between a validation and the evaluation of the runtimes


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published recipe, its corpus, and what is changed of it for the measurement."""

    base: str
    #: Tokens of the held-out part of the corpus.
    held_out: int
    #: Of the corpus.
    vocab_size: int
    changes: tuple[str, ...]


RECIPES = {
    "ptb, reduced": Recipe(
        base="ptb", held_out=73_760, vocab_size=10_000, changes=("model.layers=4", "model.vocab_size=2000")
    ),
    "al-rfou-enwik8-12l, reduced": Recipe(
        base="al-rfou-enwik8-12l",
        held_out=5_000_000,
        vocab_size=205,
        changes=("model.layers=3", "model.d_model=128", "model.heads=2", "model.d_ff=512"),
    ),
    "enwik8-base, reduced": Recipe(
        base="enwik8-base",
        held_out=5_000_000,
        vocab_size=205,
        changes=(
            *("model.layers=3", "model.d_model=128", "model.heads=2", "model.d_ff=512"),
            *("training.segment=128", "training.mem_len=128"),
            *("evaluation.segment=20", "evaluation.mem_len=525", "evaluation.clamp_len=205"),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One recipe."""

    name: str
    base: str
    changes: tuple[str, ...]
    #: The time of one token.
    trained: Timing
    validated: Timing
    #: The second over the first.
    ratio: float
    #: The same ratio by multiply-adds.
    arithmetic: float
    #: Of all validations of the published recipe in its training, by multiply-adds.
    share: float


def run(job: Job) -> Iterator[Row]:
    """A row for each recipe, or for those that are chosen."""
    repeats = job.repeats(REPEATS)
    for name in job.chosen(RECIPES):
        job.progress(
            f"{name}: comparing attention and scores with the slow ones, and timing {repeats} of each"
        )
        yield _measure(name, threads=job.threads, repeats=repeats)


def _measure(name: str, *, threads: int, repeats: int) -> Row:
    recipe = RECIPES[name]
    published = _with_vocab(TrainConfig.load(recipe.base), recipe.vocab_size)
    config = dataclasses.replace(
        with_overrides(published, recipe.changes), threads=threads, steps=1 << 20, corpus=None
    )
    check(config)
    training = Training.start(config)
    draw = np.random.default_rng(0)
    T = config.training.segment
    size = config.model.vocab_size
    tokens = draw.integers(0, size, (config.batch, 64 * T + 1))
    held_out = draw.integers(0, size, config.batch * SEGMENTS * config.validation.segment + 1)
    _compare(training, held_out)
    times = take_turns(
        {
            "trained": lambda: float(training.advance(tokens).nats),
            "validated": lambda: validate(training.model, config, held_out),
        },
        repeats=repeats,
    )
    trained = times["trained"].per(config.batch * T)
    validated = times["validated"].per(len(held_out) - 1)
    step = training_multiply_adds(config.model, config.training, config.batch)
    return Row(
        name=name,
        base=recipe.base,
        changes=recipe.changes,
        trained=trained,
        validated=validated,
        ratio=validated.median / trained.median,
        arithmetic=validation_multiply_adds(config, 1 << 20) / (1 << 20) / step * config.batch * T,
        share=validation_share(published, recipe.held_out),
    )


def _with_vocab(config: TrainConfig, size: int) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def _compare(training: Training, tokens: np.ndarray) -> None:
    """Raises ArtefactError where a validation does not give the score of the runtimes' own evaluation."""
    config = training.config
    fast = validate(training.model, config, tokens)
    vocab = IdsVocab(config.model.vocab_size)
    session = TorchSession(training.model.eval(), vocab, config.evaluation, identity="validation")
    slow = evaluate(session, tokens, lanes=config.batch).bits_per_token
    training.model.train()
    what = f"a validation ({fast:.6f} bits per token) differs from the evaluation"
    agreed(abs(fast - slow), TOLERANCE, what, "bits")


def size() -> BenchmarkConfig:
    """The sizes of the last recipe, for the history."""
    recipe = list(RECIPES.values())[-1]
    config = with_overrides(_with_vocab(TrainConfig.load(recipe.base), recipe.vocab_size), recipe.changes)
    rule = config.training
    return BenchmarkConfig(
        name="reduced recipes", model=config.model, segment=rule.segment, mem_len=rule.mem_len
    )


TARGET = 0.02  # of the time of training: what all validations of a published recipe may cost


def _share(row: Figures, run: Run) -> str:
    share = row["share"] * row["ratio"] / row["arithmetic"]
    return f"{100 * share:.2f} %" + ("" if share < TARGET else f" (**above {100 * TARGET:.0f} %**)")


CASE = Case(
    name="validation",
    summary="what validations cost: a validated token against a trained one, and the share of a run",
    run=run,
    keys=("name",),
    columns=(
        Column("model", words("name")),
        Column("ms per trained token", milliseconds("trained")),
        Column("ms per validated token", milliseconds("validated")),
        Column("ratio", decimal("ratio")),
        Column("ratio by arithmetic", decimal("arithmetic")),
        Column("share of training by arithmetic", lambda row, run: f"{100 * row['share']:.2f} %"),
        Column("share with the measured cost", _share),
    ),
    options=(repeats_option, only_option(RECIPES, "Measure this model only")),
    size=lambda options: size(),
    published=lambda history: [history.newest("validation", "reduced recipes")],
    engine="torch",
)
