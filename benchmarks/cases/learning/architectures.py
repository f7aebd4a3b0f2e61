"""Six small models of nearly equal size, trained for the same CPU time: does the order of the papers hold?

Every model has 3 layers, D 128, segments of T = 64 bytes, and memory of 64 where it has recurrence. Text,
batch, optimiser and schedule are the same. The first model is trained for as many steps as its budget of CPU
seconds allows, by the time of a few steps at the start. Each other model gets as many steps as take the same
time, by the time of a few steps of both in turns. So the machine may become faster or be replaced while a
table grows. All seeds of a model use the same number of steps. CPU seconds are of all threads together, and
only of the steps.

Each model is scored on the same held-out text. *Own*: segment by segment under the rule that it was trained
with. *Stream* and *exact* give it contexts of c = T and c = 4 T tokens; none was trained with 4 T. Stream:
segment by segment with memory of c tokens where positions are relative, also where training had none, and in
segments of c tokens without memory where positions are absolute. Exact: every token is predicted from exactly
the c tokens before it (`runtimes/tasks/context_losses.py`).

A reference is the papers' public code (`benchmarks/references`), trained for as many steps on the same lanes
with the same optimiser, and scored under the rule of its training.

Learned tables, and the tables of Shaw et al., have a row for each distance of training; the last row serves
all longer distances. One more row would never be trained, and most look-ups at 4 T would use it. Sinusoids of
absolute positions count from the end of the segment, as in the public code.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

from benchmarks.case import Case, Column, Job, Line, file_option, minutes_option, only_option, option
from benchmarks.checked_sessions import agreed
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import in_turns, milliseconds
from benchmarks.references import (
    REFERENCE_HELP,
    ReferenceSession,
    ReferenceTraining,
    code_folders,
    reference_model,
)
from benchmarks.runs import Figures, History, Run
from runtimes.base.files import read_bytes
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.tasks.context_losses import context_losses, spread_positions
from runtimes.tasks.evaluate import evaluate
from trainer.data.source import Source, load_source, with_vocab_size
from trainer.model.attention import relative_attention
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.model.model import LanguageModel, count_parameters
from trainer.model.naive import naive_attention
from trainer.run.checkpoint import TEST
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig, ScheduleConfig
from trainer.run.session import TorchSession
from trainer.training.state import Training

PROTOCOL = 2  # changes with anything that changes figures, so that older rows are not mixed with new ones
HERE = "xl-export"  # the side that this project trained
T = 64  # the training length in tokens
FACTOR = 4  # of the longer context
WARM_UP = 5
TIMED = 20
POSITIONS = 2000
LANES = 16
RECURRENT = MemoryRule(mem_len=T, segment=T, mask="full")
ALONE = MemoryRule(mem_len=0, segment=T, mask="full")
BEFORE = MemoryRule(mem_len=T, segment=T, include_self=False, initial_memory="zeros")
BASE: dict[str, Any] = {"layers": 3, "d_model": 128, "heads": 4, "head_dim": 32, "d_ff": 512}
WIDER: dict[str, Any] = BASE | {"d_ff": 576}  # for as many parameters as W_kR has in the other models
PERSISTENT: dict[str, Any] = BASE | {  # as its paper trains it; an output table of its own costs vectors
    "d_ff": 0,
    "sublayers": "all-attention",
    "persistent": 532,
    "positions": "learned",
    "context": T + 1,
    "vocabulary": VocabularyConfig(tie_weights=False, scale=False),
    "initialization": "uniform-fan-in",
}
MODELS: dict[str, tuple[dict[str, Any], MemoryRule, str]] = {  # sizes, rule of training, reference
    "Transformer-XL": (BASE, RECURRENT, "transformer-xl"),
    "without recurrence": (BASE, ALONE, "transformer-xl"),
    "Shaw positions": (
        BASE | {"positions": "shaw", "context": RECURRENT.position_rows},
        RECURRENT,
        "transformer-xl",
    ),
    "vanilla (sinusoids, no recurrence)": (
        WIDER | {"positions": "absolute", "context": FACTOR * T, "from_segment_end": True},
        ALONE,
        "transformer-xl",
    ),
    "all-attention": (PERSISTENT, BEFORE, "adaptive-span"),
    "all-attention, adaptive span": (
        PERSISTENT | {"span": SpanConfig(maximum=T, ramp=16, penalty=1e-5, initial=0.25)},
        BEFORE,
        "adaptive-span",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trained model: a name, a side, a seed."""

    name: str
    #: `xl-export`, or the name of the reference.
    side: str
    seed: int
    parameters: int
    steps: int
    #: Of training, repetitions included.
    tokens: int
    #: CPU time that was planned for the first model.
    budget_seconds: float
    #: CPU time of the steps.
    cpu_seconds: float
    #: Bits per byte, the latter two by context in tokens; empty for a reference.
    own: float
    exact: dict[str, float]
    stream: dict[str, float]
    #: In tokens, where spans are learned.
    mean_span: float | None
    #: Its name, size and SHA-256.
    text: dict[str, Any]
    protocol: int
    #: The whole configuration of the run.
    recipe: dict[str, Any]


def recipe(name: str, *, threads: int, seed: int = 0) -> TrainConfig:
    """The configuration of one of the models, whose number of steps is not decided yet."""
    sizes, rule, _ = MODELS[name]
    return TrainConfig(
        model=ModelConfig(**sizes),
        training=rule,
        evaluation=rule,
        vocab="byte",
        batch=16,
        seed=seed,
        optimizer=OptimizerConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=50),
        steps=1_000_000,
        threads=threads,
    )


def run(job: Job) -> list[Row]:
    """A row for each model and seed, of this project and of each reference that is given.

    A row is kept as soon as it is known, so that a call that is stopped loses one model at most. The fast
    attention of every model is compared with the naive one before the first is trained.
    """
    names = job.chosen(MODELS)
    seeds = job["seeds"]
    projects = code_folders(job["references"] or ())
    torch.set_num_threads(job.threads)
    for name in names:
        check(recipe(name, threads=job.threads))
    with plain_text(job["text"]) as (path, facts):
        same = {"budget_seconds": 60 * job["minutes"], "text": facts, "protocol": PROTOCOL}
        rows = [
            Row(**{name: row[name] for name in Row.__dataclass_fields__})
            for row in job.earlier
            if all(row.get(name) == same[name] for name in same)
        ]
        wanted = [  # all models of one seed first
            (name, side, seed)
            for seed in range(seeds)
            for name in names
            for side in (HERE, MODELS[name][2])
            if side in (HERE, *projects)
        ]
        for name, side, seed in wanted:
            if any((row.name, row.side, row.seed) == (name, side, seed) for row in rows):
                continue
            config = dataclasses.replace(recipe(name, threads=job.threads, seed=seed), text=path)
            config = config.with_steps(_steps(config, name, rows, same["budget_seconds"]))
            job.progress(f"{name}, {side}, seed {seed}: {config.steps:,} steps")
            source = load_source(config)
            config = with_vocab_size(config, source.vocab)
            figures = (
                _here(config, source) if side == HERE else _reference(side, projects[side], config, source)
            )
            row = Row(
                name=name,
                side=side,
                seed=seed,
                steps=config.steps,
                tokens=config.steps * config.batch * config.training.segment,
                recipe=to_json(dataclasses.replace(config, text=None)),  # no path of this machine
                **same,
                **figures,
            )
            job.keep(row)
            rows.append(row)
            job.progress(f"{name}, {side}, seed {seed}: {row.own:.4f} bits per byte as trained")
    return [row for row in rows if row.name in names and row.seed < seeds]


@contextmanager
def plain_text(text: Path | None) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The path of a text that is not compressed, and its facts; the built-in text for None."""
    if text is None:
        yield None, {"name": "the built-in text", "num_bytes": None, "sha256": None}
        return
    content = read_bytes(text)
    with tempfile.TemporaryDirectory() as temporary:
        path = text
        if text.suffix == ".gz":
            content = gzip.decompress(content)
            path = Path(temporary) / text.stem
            path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        yield str(path), {"name": path.name, "num_bytes": len(content), "sha256": digest}


def check(config: TrainConfig) -> None:
    """Raises ArtefactError where fast and naive attention of a model differ, over two segments in float64.

    The weights are large and random, and the spans are shorter than the memory. With the weights that
    training starts from, distance biases are 0 and span masks are 1, and an attention without them would
    pass.
    """
    torch.manual_seed(0)
    model = LanguageModel(dataclasses.replace(config.model, layers=1, vocab_size=50)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for span in model.spans():
        torch.nn.init.uniform_(span.share, 0, 4 / span.span.maximum)
    rule = dataclasses.replace(config.training, segment=8, mem_len=min(8, config.training.mem_len))
    tokens = torch.randint(0, 50, (2, 16))
    answers = []
    for attention in (relative_attention, naive_attention):
        memory = model.start(2, rule)
        logits = []
        for at in (0, 8):
            piece, memory = model(
                tokens[:, at : at + 8], memory, torch.full((2,), at), rule, attention=attention
            )
            logits.append(piece)
        answers.append(torch.cat(logits, dim=1))
    worst = (answers[0] - answers[1]).abs().max().item()
    agreed(worst, 1e-9, "fast and naive attention differ", "of a logit")


def _steps(config: TrainConfig, name: str, rows: Sequence[Row], cpu_seconds: float) -> int:
    """How many steps a model is trained; rows: those that are known."""
    for row in rows:
        if row.name == name:
            return row.steps
    for row in rows:
        if row.side == HERE:
            assert config.threads is not None
            other = dataclasses.replace(recipe(row.name, threads=config.threads), text=config.text)
            seconds, of_other = step_seconds([config, other])
            return max(2, int(row.steps * of_other / seconds))
    return affordable(config, cpu_seconds)


def affordable(config: TrainConfig, cpu_seconds: float) -> int:
    """The number of steps that these CPU seconds allow, by the time of a few steps after a warm-up."""
    (seconds,) = step_seconds([config])
    return max(2, int(cpu_seconds / seconds))


def step_seconds(configs: Sequence[TrainConfig]) -> list[float]:
    """The median CPU seconds of a training step of each configuration, in turns after a warm-up."""
    sides = {}
    for at, config in enumerate(configs):
        source = load_source(config)
        training = Training.start(with_vocab_size(config, source.vocab))
        sides[str(at)] = functools.partial(training.advance, source.tokens)
    for step in sides.values():
        milliseconds(step, repeats=0, warmup=WARM_UP)
    found = in_turns(sides, repeats=TIMED, turns=TIMED, warmup=0, rest=False, clock=time.process_time)
    return [median(times) / 1e3 for times in found.values()]


def _here(config: TrainConfig, source: Source) -> dict[str, Any]:
    """The figures of this project's model after training and all scores."""
    training = Training.start(config)
    began = time.process_time()
    for _ in range(config.steps):
        training.advance(source.tokens)
    seconds = time.process_time() - began
    training.refuse_not_finite()
    test = test_tokens(source)
    positions = spread_positions(len(test), count=min(POSITIONS, len(test) - FACTOR * T), longest=FACTOR * T)
    model = training.model.eval()
    exact = {}
    stream = {}

    def session(rule: MemoryRule) -> TorchSession:
        return TorchSession(model, source.vocab, rule, weights="architectures")

    for context in (T, FACTOR * T):
        rule = dataclasses.replace(config.training, mem_len=context, mask="same-length")
        if config.model.positions == "absolute":
            rule = MemoryRule(mem_len=0, segment=context, mask="full")
        nats = context_losses(session(rule), test, positions, context=context)
        exact[str(context)] = float(nats.mean()) / math.log(2)
        stream[str(context)] = evaluate(session(rule), test, lanes=LANES).bits_per_token
    spans = [span.share.detach() * span.span.maximum for span in model.spans()]
    return {
        "parameters": count_parameters(config.model),
        "cpu_seconds": seconds,
        "own": evaluate(session(config.training), test, lanes=LANES).bits_per_token,
        "exact": exact,
        "stream": stream,
        "mean_span": float(torch.cat(spans).mean()) if spans else None,
    }


def _reference(project: str, folder: Path, config: TrainConfig, source: Source) -> dict[str, Any]:
    """The figures of the public code after as many steps."""
    torch.manual_seed(config.seed)
    model = reference_model(project, folder, config)
    training = ReferenceTraining(model, config, source.tokens)
    began = time.process_time()
    for _ in range(config.steps):
        training.step()
    seconds = time.process_time() - began
    session: Any = ReferenceSession(model)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cpu_seconds": seconds,
        "own": evaluate(session, test_tokens(source), lanes=LANES).bits_per_token,
        "exact": {},
        "stream": {},
        "mean_span": model.mean_span(),
    }


def test_tokens(source: Source) -> np.ndarray:
    content = source.files[TEST]
    assert isinstance(content, bytes)
    return source.vocab.encode(content)


# The sizes that all models share, for the history.
SIZE = BenchmarkConfig(name="six small models", model=ModelConfig(**BASE), segment=T, mem_len=T)


def mean_of(values: Sequence[float]) -> str:
    """The mean of figures in bits with half of their range, which is left out for a single one."""
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{spread}"


def published(history: History) -> list[Run]:
    """The newest run of each row with the protocol, text and budget of the newest one.

    Rows of a model are left out if its newest row of this project has another number of steps. Each row has
    its CPU time, so a busy machine is no reason to leave one out.
    """
    runs = history.of("architectures")
    found: dict[tuple[str, str, int], Run] = {}
    steps: dict[str, int] = {}
    for run in runs:
        row = run.rows[0]
        if _shared(row) == _shared(runs[-1].rows[0]):
            found[row["name"], row["side"], row["seed"]] = run
            if row["side"] == HERE:
                steps[row["name"]] = row["steps"]
    return [run for (name, _, _), run in found.items() if run.rows[0]["steps"] == steps.get(name)]


def _shared(row: Figures) -> tuple[object, ...]:
    """What all rows of a table have in common."""
    return row.get("protocol"), row.get("budget_seconds"), row.get("text")


def summarized(lines: list[Line]) -> list[Line]:
    """A line for each model: its first row, with lists of the figures of all seeds and of the public code."""
    found = []
    for name in dict.fromkeys(row["name"] for row, _ in lines):
        here = [line for line in lines if (line.row["name"], line.row["side"]) == (name, HERE)]
        if not here:
            continue
        first, run = here[0]
        public = [row["own"] for row, _ in lines if row["name"] == name and row["side"] != HERE]
        near, far = sorted(first["stream"], key=int)
        seeds = {
            "cpu_seconds": [row["cpu_seconds"] for row, _ in here],
            "mean_span": [row["mean_span"] for row, _ in here if row["mean_span"] is not None],
            "own": [row["own"] for row, _ in here],
            "public": public,
        }
        for way in ("stream", "exact"):
            for distance, context in (("near", near), ("far", far)):
                seeds[f"{way}_{distance}"] = [row[way][context] for row, _ in here]
        found.append(Line({**first, **seeds, "seeds": len(here)}, run))
    return found


def _name(row: Figures, run: Run) -> str:
    spans = row["mean_span"]
    return str(row["name"]) + (f" (mean span {sum(spans) / len(spans):.0f})" if spans else "")


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    return [
        f"{row['budget_seconds'] / 60:g} CPU minutes for each model; text: {described_text(row['text'])}."
    ]


def described_text(text: dict[str, Any]) -> str:
    """The name, size and hash of a text."""
    if text["num_bytes"] is None:
        return str(text["name"])
    return f"{text['name']} ({text['num_bytes']:,} bytes, SHA-256 {text['sha256'][:12]}…)"


text_option = file_option(
    "--text", "The text to train on, plain or compressed with gzip; the built-in one by default."
)


def seeds_option(what: str) -> click.Option:
    """How often everything is trained."""
    return option("--seeds", f"{what}; 2 by default.", type=click.IntRange(1, 100), default=2)


CASE = Case(
    name="architectures",
    run=run,
    keys=("name", "side", "seed", "budget_seconds"),
    columns=(
        Column("model", _name),
        Column("parameters", "parameters", detail=True),
        Column("steps", "steps", detail=True),
        Column("million tokens", lambda row, run: f"{row['tokens'] / 1e6:.2f}"),
        Column("CPU s", lambda row, run: f"{sum(row['cpu_seconds']) / row['seeds']:,.0f}", detail=True),
        Column("seeds", "seeds"),
        Column("own rule", "own", mean_of),
        Column("public code", "public", mean_of),
        Column(f"stream {T}", "stream_near", mean_of),
        Column(f"stream {FACTOR * T}", "stream_far", mean_of),
        Column(f"exact {T}", "exact_near", mean_of),
        Column(f"exact {FACTOR * T}", "exact_far", mean_of),
    ),
    notes=_notes,
    summarized=summarized,
    options=(
        minutes_option("CPU minutes for the steps of each model, of all threads; 3 by default.", 3.0),
        text_option,
        seeds_option("Runs of each model"),
        file_option("--reference references", REFERENCE_HELP, multiple=True),
        only_option(MODELS, "Train this model only"),
    ),
    size=lambda options: SIZE,
    published=published,
    resumable=True,
    engine="torch",
)
