"""Six small models of nearly equal size, trained for the same CPU time: does the order of the papers hold?

Every model has 3 layers, D 128, segments of T = 64 tokens, and memory of 64 tokens where it has recurrence.
Corpus, batch, seed, optimiser and schedule are the same. A model is trained for as many steps as its budget
of CPU seconds allows, by the time of a few steps at the start. CPU seconds are those of all threads together.

Each model is scored in two ways on the same text, with contexts of c = T and c = 4 T tokens; none was trained
with 4 T. *Exact context*: every token is predicted from exactly the c tokens before it, as a sliding window
does, which treats all models alike (`runtimes/tasks/context_losses.py`). *Stream*: segment by segment, as the
model is meant to be used, with memory of c tokens where positions are relative, and in segments of c tokens
without memory where they are absolute.

Only relative positions extend to 4 T. Sinusoids start again after `context` tokens of the stream. With a
context of 8 T, a window of 4 T tokens, which begins at a multiple of 4 T, never meets that point, and
training uses all of these positions, T at a time. Learned tables, and those of Shaw et al., have a row for
each distance of training, 0 to 2 T - 1; the last row serves all longer distances. One more row would never be
trained, and most look-ups at 4 T would take it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.configs import BenchmarkConfig, checked_minutes
from benchmarks.measure import Limits
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.tasks.context_losses import context_losses, spread_positions
from runtimes.tasks.evaluate import evaluate
from trainer.data.source import load_source, with_vocab_size
from trainer.model.attention import relative_attention
from trainer.model.config import ModelConfig, SpanConfig
from trainer.model.model import LanguageModel, count_parameters
from trainer.model.naive import naive_attention
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig, ScheduleConfig
from trainer.run.session import TorchSession
from trainer.training.loop import train
from trainer.training.state import Training

T, FACTOR = 64, 4  # the training length in tokens, and the factor of the longer context
WARM_UP, TIMED, POSITIONS, LANES = 5, 20, 2000, 4
RECURRENT = MemoryRule(mem_len=T, segment=T, mask="full")
ALONE = MemoryRule(mem_len=0, segment=T, mask="full")
UNSEEN = dataclasses.replace(RECURRENT, include_self=False)
BASE: dict[str, Any] = {"layers": 3, "d_model": 128, "heads": 4, "head_dim": 32, "d_ff": 512}
WIDER: dict[str, Any] = BASE | {"d_ff": 576}  # for as many parameters as W_kR has in the other models
ROWS = RECURRENT.position_rows  # the number of distances in training
PERSISTENT: dict[str, Any] = BASE | {
    "d_ff": 0,
    "sublayers": "all-attention",
    "persistent": 576,
    "positions": "learned",
    "context": ROWS,
}
MODELS: dict[str, tuple[dict[str, Any], MemoryRule]] = {
    "Transformer-XL": (BASE, RECURRENT),
    "without recurrence": (BASE, ALONE),
    "Shaw positions": (BASE | {"positions": "shaw", "context": ROWS}, RECURRENT),
    "vanilla (sinusoids, no recurrence)": (
        WIDER | {"positions": "absolute", "context": 2 * FACTOR * T},
        ALONE,
    ),
    "all-attention": (PERSISTENT, UNSEEN),
    "all-attention, adaptive span": (
        PERSISTENT | {"span": SpanConfig(maximum=T, ramp=16, penalty=1e-5, initial=0.25)},
        UNSEEN,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model. exact, stream: bits per character by context in tokens.

    tokens: of training, repetitions included. budget_seconds: CPU time that was planned; cpu_seconds: that
    was spent, which includes reading the text and the last validation. mean_span: in tokens, where spans are
    learned. recipe: the whole configuration of the run.
    """

    name: str
    parameters: int
    steps: int
    tokens: int
    budget_seconds: float
    cpu_seconds: float
    exact: dict[str, float]
    stream: dict[str, float]
    mean_span: float | None
    recipe: TrainConfig

    def to_json(self) -> dict[str, Any]:
        return to_json(self)


def recipe(name: str, *, threads: int) -> TrainConfig:
    """The configuration of one of the models, whose number of steps is not decided yet."""
    sizes, rule = MODELS[name]
    return TrainConfig(
        model=ModelConfig(**sizes),
        training=rule,
        evaluation=rule,
        batch=16,
        optimizer=OptimizerConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=50),
        steps=1_000_000,
        validate_every=1 << 40,
        checkpoint_every=1 << 40,
        threads=threads,
    )


def chosen(names: Sequence[str]) -> list[str]:
    """The models of these names, and all where none is given; raises ConfigError for an unknown name."""
    for name in names:
        if name not in MODELS:
            raise ConfigError(f"{name} is not one of the models; give one of {', '.join(MODELS)}.")
    return [name for name in MODELS if not names or name in names]


def run(
    out: Path = Path("architectures"),
    *,
    minutes: float = 3.0,
    threads: int,
    names: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each model, trained and scored one after the other.

    The fast attention of every model is compared with the naive one before the first is trained.
    """
    minutes, wanted = checked_minutes(minutes), chosen(names)
    for name in wanted:
        check(recipe(name, threads=threads))
    rows = []
    for name in wanted:
        config = recipe(name, threads=threads)
        steps = affordable(config, 60 * minutes)
        config = config.with_steps(steps)
        progress(f"{name}: {steps:,} steps")
        began = time.process_time()
        folder = train(config, out / name.replace(" ", "-").replace(",", ""), force=True, progress=False)
        spent = time.process_time() - began
        rows.append(score(name, folder, budget_seconds=60 * minutes, cpu_seconds=spent))
        scores = ", ".join(f"{bits:.4f} with {context} tokens" for context, bits in rows[-1].stream.items())
        progress(f"{name}: bits per character {scores}")
    return rows


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
        memory, logits = model.start(2, rule), []
        for at in (0, 8):
            piece, memory = model(
                tokens[:, at : at + 8], memory, torch.full((2,), at), rule, attention=attention
            )
            logits.append(piece)
        answers.append(torch.cat(logits, dim=1))
    worst = (answers[0] - answers[1]).abs().max().item()
    if not worst <= 1e-9:
        raise ArtefactError(
            f"fast and naive attention differ by {worst:.3g}; nothing was trained, please report this."
        )


def affordable(config: TrainConfig, cpu_seconds: float) -> int:
    """The number of steps that these CPU seconds allow, by the time of a few steps after a warm-up."""
    source = load_source(config)
    training = Training.start(with_vocab_size(config, source.vocab))
    for _ in range(WARM_UP):
        training.advance(source.tokens)
    began = time.process_time()
    for _ in range(TIMED):
        training.advance(source.tokens)
    return max(2, int(cpu_seconds * TIMED / max(time.process_time() - began, 1e-9)))


def score(name: str, folder: Path, *, budget_seconds: float, cpu_seconds: float) -> Row:
    """The row of a trained run: both scores of its test text with T and 4 T tokens of context."""
    run = load_run(folder)
    tokens = run.vocab.encode((folder / "test.txt").read_bytes())
    positions = spread_positions(
        len(tokens), count=min(POSITIONS, len(tokens) - FACTOR * T), longest=FACTOR * T
    )
    absolute = run.config.model.positions == "absolute"
    exact, stream = {}, {}
    for context in (T, FACTOR * T):
        rule = MemoryRule(mem_len=context, segment=T, include_self=run.config.evaluation.include_self)
        if absolute:
            rule = MemoryRule(mem_len=0, segment=context, mask="full")
        session = TorchSession(run.model.eval(), run.vocab, rule, identity=f"{run.sha256} {rule}")
        nats = context_losses(session, tokens, positions, context=context)
        exact[str(context)] = float(nats.mean()) / math.log(2)
        stream[str(context)] = evaluate(session, tokens, lanes=LANES).bits_per_token
    spans = [span.share.detach() * span.span.maximum for span in run.model.spans()]
    recipe, steps = run.config, run.config.steps
    return Row(
        name=name,
        parameters=count_parameters(recipe.model),
        steps=steps,
        tokens=steps * recipe.batch * recipe.training.segment,
        budget_seconds=budget_seconds,
        cpu_seconds=cpu_seconds,
        exact=exact,
        stream=stream,
        recipe=recipe,
        mean_span=float(np.mean([span.numpy() for span in spans])) if spans else None,
    )


def table(rows: Sequence[Row], limits: Limits | None = None) -> list[str]:
    """The rows as lines of a markdown table."""
    near, far = str(T), str(FACTOR * T)
    lines = [
        f"| model | parameters | steps | million tokens | CPU s | exact {near} | exact {far} | stream {near} "
        f"| stream {far} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spans = "" if row.mean_span is None else f" (mean span {row.mean_span:.0f})"
        lines.append(
            f"| {row.name}{spans} | {row.parameters:,} | {row.steps:,} | {row.tokens / 1e6:.2f} "
            f"| {row.cpu_seconds:.0f} | {row.exact[near]:.4f} | {row.exact[far]:.4f} "
            f"| {row.stream[near]:.4f} | {row.stream[far]:.4f} |"
        )
    return lines


def described() -> BenchmarkConfig:
    """The sizes that all models share, for the history."""
    return BenchmarkConfig(
        name="six small models",
        model=ModelConfig(**BASE),
        segment=T,
        attention_lengths=(T, FACTOR * T),
        repeats=1,
        mem_len=T,
        token_repeats=1,
    )
