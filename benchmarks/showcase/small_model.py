"""The second part of the demo: a small model is trained, exported, checked, scored and measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.cases.sliding_window import Row, run
from benchmarks.configs import BenchmarkConfig
from benchmarks.showcase.lines import WIDTH, echo_title
from runtimes.base.files import read_bytes
from runtimes.sessions.open import open_session
from runtimes.tasks.check import CheckReport, check
from runtimes.tasks.evaluate import Score, evaluate
from runtimes.tasks.generate import generate
from runtimes.tasks.sample import Sampler
from trainer.run.config import TrainConfig
from trainer.training.loop import TEST, train
from xl_export.artefact.export import export

PROMPT, CHARACTERS, SEED, LANES = "The ", 200, 0, 4
SAMPLER = Sampler(top_k=40)
STEPS = 1000  # half of the configuration's own: the demo is to end in a few minutes


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """What the demo found out about the model that it trained."""

    scores: dict[str, Score]
    report: CheckReport
    row: Row
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "scores": {name: score.to_json() for name, score in self.scores.items()},
            "check": self.report.to_json(),
            "sliding_window": self.row.to_json(),
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
            f"{'per token, segments with memory':<{WIDTH}}{self.row.segment.median:.3f} ms",
            f"{'per token, sliding window':<{WIDTH}}{self.row.window.median:.3f} ms: {self.row.ratio:,.0f} "
            f"times the cost ({self.row.predicted_ratio:,.0f} by arithmetic), attention length "
            f"{self.row.attention_length}",
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
    echo_title("generate", f"{CHARACTERS} characters, seed {SEED}, top-k {SAMPLER.top_k}")
    text = _write(artefact)
    echo_title(
        "measure",
        "one token in segments with memory, and by a recomputed window; random weights of the same size",
    )
    return SmallModel(scores=scores, report=report, row=_against_window(config), text=text)


def _scores(trained: Path, artefact: Path) -> dict[str, Score]:
    scores = {}
    for engine, folder in (("PyTorch", trained), ("ONNX Runtime", artefact)):
        session = open_session(folder, device="cpu")
        tokens = session.vocab.encode(read_bytes(trained / TEST))
        for memory, carry in ((f"memory {session.rule.mem_len}", True), ("memory cut to zero", False)):
            scores[f"{engine}, {memory}"] = evaluate(session, tokens, lanes=LANES, carry_memory=carry)
            click.echo(
                f"{engine}, {memory}: {scores[f'{engine}, {memory}'].bits_per_token:.4f} bits per character"
            )
    return scores


def _write(artefact: Path) -> str:
    text = PROMPT
    click.echo(text, nl=False)
    session = open_session(artefact, device="cpu")
    for piece in generate(session, PROMPT, max_tokens=CHARACTERS, sampler=SAMPLER, seed=SEED):
        click.echo(piece.text, nl=False)
        text += piece.text
    click.echo("")
    return text


def _against_window(config: TrainConfig) -> Row:
    rule = config.evaluation
    size = BenchmarkConfig(
        name="demo",
        model=dataclasses.replace(config.model, vocab_size=256),
        segment=rule.segment,
        attention_lengths=(rule.mem_len,),
        repeats=30,
        mem_len=rule.mem_len,
        token_repeats=30,
    )
    return run(size)[0]
