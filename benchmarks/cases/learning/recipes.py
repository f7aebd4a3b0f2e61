"""Published recipes, reduced to a size that a CPU trains, on whatever piece of their corpus is at hand.

The published sizes need GPUs for days. What a reduced recipe changes is a list of assignments as in
`xl-export train --set`. A recipe is trained for as many steps as its budget of CPU seconds allows, by the
time of a few steps at the start; validations and checkpoints are not in the budget. The run is a folder like
any other: it can be resumed, which a second call of this case does, exported, and compared.

A piece of enwik8 or text8 is cut 90/5/5 as the whole corpus is. It is not the published text, so the scores
are not comparable with published ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case, Column, Job, Line, file_option, minutes_option, only_option
from benchmarks.configs import BenchmarkConfig
from benchmarks.runs import Figures, Run
from runtimes.base.errors import ConfigError
from runtimes.base.files import sha256
from runtimes.tasks.evaluate import evaluate
from trainer.data.dataset import open_dataset
from trainer.data.prepare import prepare
from trainer.data.source import load_source, with_vocab_size
from trainer.model.model import count_parameters
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.run.history import CONFIG, METRICS
from trainer.run.overrides import with_overrides
from trainer.run.session import TorchSession
from trainer.training.loop import resume, train
from trainer.training.state import Training

PROTOCOL = 1  # changes with anything that changes figures, so that older rows are not mixed with new ones
VALIDATIONS = 20  # of a run
VALIDATED = 1 << 14  # held-out tokens that each validation scores
LANES = 8  # rows of the last score
TIMED_SHARE = 0.05  # of the budget: what timing takes at most, and at least one step
TIMED = 20  # steps: what timing takes at most
SIZES = ("model.layers=4", "model.d_model=256", "model.heads=4", "model.head_dim=64")
SHORT = (
    "training.segment=128",
    "training.mem_len=128",
    "evaluation.segment=128",
    "evaluation.mem_len=256",
    "evaluation.clamp_len=null",
    "batch=16",
    "optimizer.lr=0.001",
    "schedule.warmup_steps=100",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published recipe, and what is changed of it."""

    #: The built-in configuration.
    base: str
    #: The file in the folder with the corpora.
    pattern: str
    #: The score on the test part that the paper reports for the recipe as published, trained to the end: bits
    #: per symbol, or the perplexity of words.
    published: float
    changes: tuple[str, ...]


BYTES = (*SIZES, "model.d_ff=1024", *SHORT)
RECIPES = {
    "enwik8-base, reduced": Recipe(base="enwik8-base", pattern="enwik8*", published=1.06, changes=BYTES),
    "text8-large, reduced": Recipe(base="text8-large", pattern="text8*", published=1.08, changes=BYTES),
    "all-attention-text8, reduced": Recipe(
        base="all-attention-text8",
        pattern="text8*",
        published=1.11,
        changes=(
            *SIZES,
            "model.persistent=512",
            "model.attention_dropout=0",
            "model.context=257",
            "model.span.maximum=256",
            "training.segment=128",
            "training.mem_len=256",
            "evaluation.segment=128",
            "evaluation.mem_len=256",
            "batch=16",
            "accumulate=1",
            "schedule.warmup_steps=500",
        ),
    ),
    "ptb, reduced": Recipe(
        base="ptb",
        pattern="*ptb*",
        published=54.52,
        changes=(
            "model.layers=4",
            "model.dropout=0.2",
            "model.embedding_dropout=0.2",
            "optimizer.lr=0.001",
            "schedule.warmup_steps=100",
        ),
    ),
}
Wanted = dict[str, Any]  # a row that is wanted, by everything that its figures depend on
DEFAULT = ("enwik8-base, reduced", "text8-large, reduced", "ptb, reduced")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trained recipe."""

    name: str
    #: Assignments as `--set` takes them.
    changes: tuple[str, ...]
    published: float
    #: What a token is.
    unit: str
    parameters: int
    steps: int
    #: Tokens of a step.
    step_tokens: int
    #: CPU time that was planned for the steps alone.
    budget_seconds: float
    #: Of all threads, with validations and checkpoints; null where an earlier process began the run.
    cpu_seconds: float | None
    #: [step, score of the held-out tokens in bits], ascending.
    validation: tuple[tuple[float, ...], ...]
    #: Bits per token of the whole test part, with the weights that validated best.
    test: float
    #: The name and SHA-256 of the file, whether it is the published one, and tokens of each part.
    corpus: dict[str, Any]
    threads: int
    protocol: int


def run(job: Job) -> Iterator[Row]:
    """A row for each recipe; datasets and runs are folders in --out.

    A row of an earlier call that has all that is wanted is not trained again. A run that was stopped goes on
    from its last checkpoint.
    """
    out = job["out"]
    for name in job.chosen(RECIPES, DEFAULT):
        source = _corpus_file(RECIPES[name], job["corpora"])
        wanted = {  # all that the figures of the row depend on
            "name": name,
            "changes": list(RECIPES[name].changes),
            "budget_seconds": 60.0 * job["minutes"],
            "sha256": sha256(source),
            "threads": job.threads,
            "protocol": PROTOCOL,
        }
        known = [row for row in job.earlier if _facts(row, wanted) == wanted]
        if known:
            yield Row(**{name: known[-1][name] for name in Row.__dataclass_fields__})
            continue
        row = _trained(wanted, source, _dataset(wanted, source, out, job.progress), out, job.progress)
        job.keep(row)
        job.progress(f"{name}: {row.test:.4f} bits per {row.unit} of the test part")
        yield row


def _facts(row: Figures, wanted: Wanted) -> Wanted:
    """The same facts of a row of the history."""
    corpus = row.get("corpus", {})  # a row of another case has none
    return {**{name: row.get(name) for name in wanted}, "sha256": corpus.get("sha256")}


def folder_name(wanted: Wanted) -> str:
    """The name of a run's folder, which ends with the first 8 digits of a hash of what is wanted.

    So a run never goes on with another text, other changes or other threads than it began with.
    """
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    return f"{wanted['name'].replace(', ', '-')}-{wanted['budget_seconds'] / 60:g}-{digest[:8]}"


def configuration(recipe: Recipe, data: Path | None, *, threads: int) -> TrainConfig:
    """The recipe with its changes, whose number of steps is not decided yet."""
    config = with_overrides(TrainConfig.load(recipe.base), recipe.changes)
    return dataclasses.replace(config, data=None if data is None else str(data), threads=threads)


def for_budget(config: TrainConfig, cpu_seconds: float) -> TrainConfig:
    """The configuration with as many steps as these CPU seconds allow, and validations all along."""
    steps = affordable(config, cpu_seconds)
    return dataclasses.replace(
        config.with_steps(steps),
        validate_every=max(1, steps // VALIDATIONS),
        validate_tokens=VALIDATED,
        checkpoint_every=max(1, steps // VALIDATIONS),
    )


def affordable(config: TrainConfig, cpu_seconds: float) -> int:
    """The number of steps that these CPU seconds allow, by the time of a few steps after the first one."""
    source = load_source(config)
    training = Training.start(with_vocab_size(config, source.vocab))
    training.advance(source.tokens)
    began = time.process_time()
    done = 0
    while not done or (done < TIMED and time.process_time() - began < TIMED_SHARE * cpu_seconds):
        training.advance(source.tokens)
        done += 1
    return max(2, int(cpu_seconds * done / max(time.process_time() - began, 1e-9)))


def _corpus_file(recipe: Recipe, corpora: Path | None) -> Path:
    """The file of the corpus; raises ConfigError where the folder has none."""
    if corpora is None:
        raise ConfigError("recipes needs the folder with pieces of the corpora; give --corpora FOLDER.")
    files = sorted(corpora.glob(recipe.pattern))
    if not files:
        raise ConfigError(f"{corpora} has no file named {recipe.pattern}; give the folder with the corpora.")
    return files[0]


def _dataset(wanted: Wanted, source: Path, out: Path, progress: Callable[[str], None]) -> Path:
    """The dataset of the corpus's file, made newly or by an earlier call; its name has the file's hash."""
    corpus = TrainConfig.load(RECIPES[wanted["name"]].base).corpus
    assert corpus is not None
    data = out / "data" / f"{corpus}-{wanted['sha256'][:8]}"
    if not data.is_dir():
        progress(f"preparing {corpus} from {source.name}")
        data.parent.mkdir(parents=True, exist_ok=True)
        prepare(corpus, source, data, unverified=True)
    return data


def _trained(wanted: Wanted, source: Path, data: Path, out: Path, progress: Callable[[str], None]) -> Row:
    name = wanted["name"]
    recipe = RECIPES[name]
    folder = out / folder_name(wanted)
    began = time.process_time()
    goes_on = (folder / CONFIG).is_file()
    if goes_on:
        progress(f"{name}: going on with {folder}")
        resume(folder, progress=False)
    else:
        config = for_budget(configuration(recipe, data, threads=wanted["threads"]), wanted["budget_seconds"])
        progress(f"{name}: {config.steps:,} steps")
        began = time.process_time()
        train(config, folder, progress=False)
    seconds = time.process_time() - began
    trained = load_run(folder)
    dataset = open_dataset(data)
    config = trained.config
    rule = trained.config.evaluation
    session = TorchSession(trained.model.eval(), trained.vocab, rule, weights=trained.sha256)
    torch.set_num_threads(wanted["threads"])
    return Row(
        name=name,
        changes=recipe.changes,
        published=recipe.published,
        unit={"byte": "byte", "char": "character"}.get(config.vocab, "word"),
        parameters=count_parameters(config.model),
        steps=config.steps,
        step_tokens=config.batch * config.training.segment,
        budget_seconds=wanted["budget_seconds"],
        cpu_seconds=None if goes_on else seconds,
        validation=tuple(_validations(folder)),
        test=evaluate(session, dataset.test, lanes=LANES).bits_per_token,
        corpus={
            "name": source.name,
            "sha256": wanted["sha256"],
            "published": dataset.facts.published,
            "tokens": dataset.facts.tokens,
        },
        threads=wanted["threads"],
        protocol=wanted["protocol"],
    )


def _validations(folder: Path) -> Iterator[tuple[float, ...]]:
    """Steps and scores of a run's record, in its order."""
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        if "validation_bits_per_token" in facts:
            yield (facts["step"], round(facts["validation_bits_per_token"], 4))


def score(bits: float, unit: str) -> str:
    """Bits per byte or character, and the perplexity of a word."""
    return f"perplexity {2**bits:,.1f}" if unit == "word" else f"{bits:.3f} bits"


def _minutes(row: Figures, run: Run) -> str:
    return "stopped and resumed" if row["cpu_seconds"] is None else f"{row['cpu_seconds'] / 60:.1f}"


def _best(row: Figures, run: Run) -> str:
    scores = [bits for _, bits in row["validation"]]
    return score(min(scores), row["unit"]) if scores else ""


def _notes(lines: Sequence[Line]) -> list[str]:
    texts = dict.fromkeys(
        f"{corpus['name']} ({', '.join(f'{count:,}' for count in corpus['tokens'].values())} tokens, SHA-256 "
        f"{corpus['sha256'][:12]}…)"
        for corpus in (row["corpus"] for row, _ in lines)
    )
    return [f"Texts, with the tokens of training, validation and test: {'; '.join(texts)}."]


CASE = Case(
    name="recipes",
    run=run,
    keys=("name", "budget_seconds", "threads", "protocol"),
    columns=(
        Column("recipe", "name"),
        Column("parameters", "parameters", lambda count: f"{count / 1e6:.1f}M"),
        Column("steps", "steps", detail=True),
        Column("million tokens", lambda row, run: f"{row['steps'] * row['step_tokens'] / 1e6:.2f}"),
        Column(
            "passes over the text",
            lambda row, run: f"{row['steps'] * row['step_tokens'] / row['corpus']['tokens']['train']:.2f}",
        ),
        Column("CPU minutes, with validations", _minutes),
        Column("best validation", _best),
        Column("test", lambda row, run: score(row["test"], row["unit"])),
        Column("the paper's recipe, to the end", "published", "g"),
    ),
    notes=_notes,
    options=(
        minutes_option("CPU minutes for the steps of each recipe, of all threads; 3 by default.", 3.0),
        file_option("--corpora", "The folder with enwik8, text8 and Penn Treebank, or pieces of them."),
        file_option("--out", "The folder for datasets and runs.", default=Path("recipes")),
        only_option(RECIPES, "Train this recipe only"),
    ),
    size=lambda options: BenchmarkConfig.of("recipes", configuration(RECIPES[DEFAULT[0]], None, threads=1)),
    published=lambda history: list({run.rows[0]["name"]: run for run in history.of("recipes")}.values()),
    resumable=True,
    engine="torch",
)
