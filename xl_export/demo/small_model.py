"""The second part of the demo: a small model is trained, exported, checked, scored and measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from runtimes.base.files import read_bytes
from runtimes.base.records import to_json
from runtimes.contract.sampling import read_sampling
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from runtimes.tasks.check import CheckReport, check
from runtimes.tasks.evaluate import Score, evaluate
from trainer.run.checkpoint import TEST
from trainer.run.config import TrainConfig
from trainer.training.loop import train
from xl_export.artefact.export import export
from xl_export.demo.shipped import WIDTH, echo_title, write_text

PROMPT = "The "
GENERATED_CHARACTERS = 200
SEED = 0
LANES = 4
REPEATS = 30  # timed calls of each side
STEPS = 500  # a quarter of the configuration's own: the demo ends in about a minute on two idle cores
SCORED_CHARACTERS = 6000  # characters of the held-out text; each of four sides reads them


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a token costs with memory, and without: then its whole window is computed again, token by token.

    Both sides are the same artefact. `benchmarks run sliding-window` compares with the fastest window.
    """

    segment: float  # ms for a token of a segment, with memory
    window: float  # ms for one token, by a window
    attention_length: int  # tokens of the memory and of the window

    @property
    def ratio(self) -> float:
        return self.window / self.segment

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """What the demo found out about the model that it trained."""

    scores: dict[str, Score]
    report: CheckReport
    cost: Cost
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "scores": {name: score.to_json() for name, score in self.scores.items()},
            "check": self.report.to_json(),
            "sliding_window": self.cost.to_json(),
            "text": self.text,
        }

    def table(self) -> list[str]:
        """The scores, and what a token costs, as lines of text."""
        return [
            f"{'the small model, on held-out text':<{WIDTH}}bits per character    tokens/s",
            *(
                f"{name:<{WIDTH}}{score.bits_per_token:>18.4f}{score.tokens_per_second:>12,.0f}"
                for name, score in self.scores.items()
            ),
            f"{'per token, segments with memory':<{WIDTH}}{self.cost.segment:.3f} ms",
            f"{'per token, sliding window':<{WIDTH}}{self.cost.window:.3f} ms: {self.cost.ratio:,.0f} "
            f"times the cost ({self.cost.attention_length} by arithmetic), attention length "
            f"{self.cost.attention_length}",
        ]


def train_small_model(out: Path, *, steps: int | None, force: bool) -> SmallModel:
    """Trains the configuration `demo` into `out`/run, exports it to `out`/artefact, and measures both."""
    config = TrainConfig.load("demo").with_steps(steps or STEPS)
    echo_title("train a small one", f"{config.steps} steps on the built-in corpus, seed {config.seed}")
    trained = train(config, out / "run", force=force)
    echo_title("export", "ring memory; the graph is compared with PyTorch before the folder appears")
    artefact = export(trained, out / "artefact", force=force)
    echo_title("check", "the artefact against the answers of PyTorch that it contains; no PyTorch is needed")
    report = check(artefact, device="cpu")
    click.echo(
        f"largest difference over {report.tokens} tokens: {report.max_difference:.2e} nats (tolerance "
        f"{report.tolerance:g})"
    )
    echo_title(
        "evaluate",
        f"held-out text in {LANES} lanes, with memory and with memory cut to zero before every segment",
    )
    scores = _scores(trained, artefact)
    echo_title("generate", f"{GENERATED_CHARACTERS} characters, seed {SEED}, {read_sampling(artefact)}")
    session = open_session(artefact, device="cpu")
    text = write_text(session, PROMPT, tokens=GENERATED_CHARACTERS, seed=SEED)
    echo_title(
        "measure",
        "one token in segments with memory, and when the artefact computes the whole window again for it",
    )
    cost = measure_cost(session)
    return SmallModel(scores=scores, report=report, cost=cost, text=text)


def _scores(trained: Path, artefact: Path) -> dict[str, Score]:
    scores = {}
    for engine, folder in (("PyTorch", trained), ("ONNX Runtime", artefact)):
        session = open_session(folder, device="cpu")
        tokens = session.vocab.encode(read_bytes(trained / TEST))[:SCORED_CHARACTERS]
        for memory, carry in ((f"memory {session.rule.mem_len}", True), ("memory cut to zero", False)):
            scores[f"{engine}, {memory}"] = evaluate(session, tokens, lanes=LANES, carry_memory=carry)
            click.echo(
                f"{engine}, {memory}: {scores[f'{engine}, {memory}'].bits_per_token:.4f} bits per character"
            )
    return scores


def measure_cost(session: Session) -> Cost:
    """The cost of a token with memory and by a window as long; the two are timed in turns."""
    rule = session.rule
    tokens = np.random.default_rng(0).integers(0, session.vocab.size, (1, rule.mem_len))
    pieces = [tokens[:, at : at + rule.segment] for at in range(0, rule.mem_len, rule.segment)]
    memory = session.start(1)
    seconds = np.empty((REPEATS, 2))
    for row in seconds:
        began = time.perf_counter()
        session.step(pieces[0], memory)
        row[0] = (time.perf_counter() - began) / pieces[0].shape[1]
        began = time.perf_counter()
        window = session.start(1)
        for piece in pieces:
            session.step(piece, window)
        row[1] = time.perf_counter() - began
    segment, whole = np.median(seconds, axis=0) * 1e3
    return Cost(segment=float(segment), window=float(whole), attention_length=rule.mem_len)
