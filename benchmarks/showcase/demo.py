"""The demo: a trained model writes; then a small one is trained, exported, checked, scored and measured.

It ends with a table, a story and music. The latter two are of trained models.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from benchmarks.cases.sliding_window import Row, run
from benchmarks.configs import BenchmarkConfig
from benchmarks.showcase.shipped import (
    MUSIC,
    STORIES,
    Flat,
    find_shipped,
    measure_flat,
    play_music,
    write_text,
)
from runtimes.base.files import atomic_file, read_bytes
from runtimes.base.folders import refuse_existing
from runtimes.sessions.open import open_session
from runtimes.tasks.check import CheckReport, check
from runtimes.tasks.evaluate import Score, evaluate
from runtimes.tasks.generate import generate
from runtimes.tasks.sample import Sampler
from trainer.run.config import TrainConfig
from trainer.training.loop import METRICS, TEST, train
from xl_export.artefact.export import export

PROMPT, CHARACTERS, LANES = "The ", 200, 4
# Two beginnings with seeds whose texts were chosen by hand: the model writes best after a few sentences.
OPENING = (
    "Once upon a time there was a poor woodcutter who had three sons. The youngest was called Jack. One day "
    "Jack went into the forest, and there he met an old woman."
)
STORY = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "One winter evening somebody knocked at the door. It was a bear."
)
OPENING_SEED, STORY_SEED = 3, 8
OPENING_TOKENS, STORY_TOKENS = 118, 330
TEXT = "story.txt"
WIDTH = 44  # columns of what a line of the table is about
STEPS = 1000  # half of the configuration's own: the demo is to end in a few minutes


def run_demo(out: Path, *, steps: int | None = None, force: bool = False) -> dict[str, Any]:
    """Runs every step and prints what it does; returns the figures of the table.

    The run is written to `out`/run, the artefact to `out`/artefact, the story to `out`/story.txt and the
    music to `out`/music.mid and `out`/music.wav. steps: of training. Where a trained model of `examples/` is
    not at hand, the demo has no story or no music.
    """
    refuse_existing(out, force=force, marker=f"run/{METRICS}")
    config = TrainConfig.load("demo").with_steps(steps or STEPS)
    shipped, reports, flat = find_shipped(), {}, None
    if shipped is None:
        click.echo(
            f"{STORIES} is not here (its recipe is in {STORIES.parent}), so the demo has only its small model"
        )
    else:
        _title(
            "a trained model writes",
            f"{shipped}, {OPENING_TOKENS} tokens after the first three sentences; a small model, trained for "
            "about an hour of CPU time, whose text was chosen",
        )
        reports["stories"], flat = _show(shipped)
    _title("train a small one", f"{config.steps} steps on the built-in corpus")
    trained = train(config, out / "run", force=force)
    _title("export", "ring memory; the graph is compared with PyTorch before the folder appears")
    artefact = export(trained, out / "artefact", force=force)
    _title("check", "the artefact against the answers of PyTorch that it contains; no PyTorch is needed")
    report = reports["artefact"] = check(artefact, device="cpu")
    click.echo(
        f"largest difference over {report.tokens} tokens: {report.max_difference:.2e} nats (tolerance "
        f"{report.tolerance:g})"
    )
    _title(
        "evaluate",
        f"held-out text in {LANES} lanes, with memory and with memory cut to zero before every segment",
    )
    scores = _scores(trained, artefact)
    _title("generate", f"{CHARACTERS} characters, top-k 40")
    text = _write(artefact)
    _title(
        "measure",
        "one token in segments with memory, and by a recomputed window; random weights of the same size",
    )
    row = _against_window(config)
    click.echo("")
    for line in table(scores, reports, row, flat):
        click.echo(line)
    if shipped is not None:
        _title("a story", f"of the trained model, to keep: {out / TEXT}")
        with atomic_file(out / TEXT) as temporary:
            temporary.write_text(
                write_text(open_session(shipped, device="cpu"), STORY, tokens=STORY_TOKENS, seed=STORY_SEED)
                + "\n",
                "utf-8",
            )
    if (music := find_shipped(MUSIC)) is not None:
        _title("music", "four voices by another trained model, in the manner of Bach's chorales")
        play_music(music, out / "music", force=force)
    return {
        "scores": {name: score.to_json() for name, score in scores.items()},
        "check": report.to_json(),
        "sliding_window": row.to_json(),
        "text": text,
        "trained_model": None if flat is None else {"check": reports["stories"].to_json(), **flat.to_json()},
        "passed": all(report.passed for report in reports.values()),
    }


def _show(shipped: Path) -> tuple[CheckReport, Flat]:
    """Lets the trained model write, checks it, and measures what a token costs early and late in a stream."""
    session = open_session(shipped, device="cpu")
    write_text(session, OPENING, tokens=OPENING_TOKENS, seed=OPENING_SEED)
    report = check(shipped, device="cpu")
    flat = measure_flat(session)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}; a token took {flat.first:.2f} ms at the start "
        f"of a stream and {flat.last:.2f} ms after {flat.tokens:,} tokens; the memory is always "
        f"{flat.memory_bytes / 1e6:.1f} MB"
    )
    return report, flat


def table(
    scores: dict[str, Score], reports: dict[str, CheckReport], row: Row, flat: Flat | None
) -> list[str]:
    """The figures as lines of text."""
    lines = [f"{'':<{WIDTH}}bits per character    tokens/s"]
    lines += [
        f"{name:<{WIDTH}}{score.bits_per_token:>18.4f}{score.tokens_per_second:>12,.0f}"
        for name, score in scores.items()
    ]
    lines += [
        f"{f'{name} against {report.against}':<{WIDTH}}{'passed' if report.passed else 'FAILED'}: at most "
        f"{report.max_difference:.1e} nats apart"
        for name, report in reports.items()
    ]
    if flat is not None:
        lines.append(
            f"{'per token, stories':<{WIDTH}}{flat.first:.3f} ms at first, {flat.last:.3f} ms after "
            f"{flat.tokens:,} tokens, memory {flat.memory_bytes / 1e6:.1f} MB"
        )
    return [
        *lines,
        f"{'per token, segments with memory':<{WIDTH}}{row.segment.median:.3f} ms",
        f"{'per token, sliding window':<{WIDTH}}{row.window.median:.3f} ms: {row.ratio:,.0f} times the cost "
        f"({row.predicted_ratio:,.0f} by arithmetic), attention length {row.attention_length}",
    ]


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
    for piece in generate(
        open_session(artefact, device="cpu"), PROMPT, max_tokens=CHARACTERS, sampler=Sampler(top_k=40)
    ):
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
