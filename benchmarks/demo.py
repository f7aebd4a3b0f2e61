"""All steps in one call: train, export, check, evaluate, generate and measure, and one table at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from benchmarks.cases.sliding_window import Row, run
from benchmarks.configs import BenchmarkConfig
from runtimes.base.files import read_bytes
from runtimes.base.folders import refuse_existing
from runtimes.sessions.open import open_session
from runtimes.tasks.check import CheckReport, check
from runtimes.tasks.evaluate import Score, evaluate
from runtimes.tasks.generate import generate
from runtimes.tasks.sample import Sampler
from trainer.run.config import TrainConfig
from trainer.training.loop import METRICS, TEST, train
from xl_export.artefact.export import export

PROMPT, CHARACTERS, LANES = "The ", 300, 4


def run_demo(out: Path, *, steps: int | None = None, force: bool = False) -> dict[str, Any]:
    """Runs every step and prints what it does; returns the figures of the table.

    The run is written to `out`/run and the artefact to `out`/artefact. steps: of training; by default those
    of the demo configuration.
    """
    refuse_existing(out, force=force, marker=f"run/{METRICS}")
    config = TrainConfig.load("demo")
    if steps is not None:
        config = config.with_steps(steps)
    _title(
        "1/6 train",
        f"{config.steps} steps on the built-in corpus",
    )
    trained = train(config, out / "run", force=force)
    _title("2/6 export", "ring memory; the graph is compared with PyTorch before the folder appears")
    artefact = export(trained, out / "artefact", force=force)
    _title("3/6 check", "the artefact against the answers of PyTorch that it contains; no PyTorch is needed")
    report = check(artefact)
    click.echo(
        f"largest difference over {report.tokens} tokens: {report.max_difference:.2e} nats (tolerance "
        f"{report.tolerance:g})"
    )
    _title(
        "4/6 evaluate",
        f"held-out text in {LANES} lanes, with memory and with memory cut to zero before every segment",
    )
    scores = _scores(trained, artefact)
    _title("5/6 generate", f"{CHARACTERS} characters, top-k 40")
    text = _write(artefact)
    _title(
        "6/6 measure",
        "one token in segments with memory, and by a recomputed window; random weights of the same size",
    )
    row = _against_window(config)
    click.echo("")
    for line in table(scores, report, row):
        click.echo(line)
    return {
        "scores": {name: score.to_json() for name, score in scores.items()},
        "check": report.to_json(),
        "sliding_window": row.to_json(),
        "text": text,
    }


def table(scores: dict[str, Score], report: CheckReport, row: Row) -> list[str]:
    """The figures as lines of text."""
    lines = [f"{'':<34}bits per character    tokens/s"]
    lines += [
        f"{name:<34}{score.bits_per_token:>18.4f}{score.tokens_per_second:>12,.0f}"
        for name, score in scores.items()
    ]
    verdict = "passed" if report.passed else "FAILED"
    return [
        *lines,
        f"{'artefact against PyTorch':<34}{verdict}: at most {report.max_difference:.1e} nats apart",
        f"{'per token, segments with memory':<34}{row.segment.median:.3f} ms",
        f"{'per token, sliding window':<34}{row.window.median:.3f} ms: {row.ratio:,.0f} times the cost "
        f"({row.predicted_ratio:,.0f} by arithmetic), attention length {row.attention_length}",
    ]


def _scores(trained: Path, artefact: Path) -> dict[str, Score]:
    scores = {}
    for engine, folder in (("PyTorch", trained), ("ONNX Runtime", artefact)):
        session = open_session(folder)
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
    for piece in generate(open_session(artefact), PROMPT, max_tokens=CHARACTERS, sampler=Sampler(top_k=40)):
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


def _title(step: str, what: str) -> None:
    click.echo(f"\n== {step}: {what}")
