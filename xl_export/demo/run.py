"""The demo: the trained models of `examples/` write and play; on request a small one is trained and compared.

Without a training it needs only NumPy, ONNX Runtime, click and tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, refuse_unwritable, writing
from runtimes.base.folders import refuse_existing, refuse_place
from runtimes.base.kinds import ARTEFACT, RUN
from runtimes.base.records import to_json
from runtimes.contract.sampling import read_sampling
from runtimes.sessions.open import open_session
from runtimes.tasks.check import CheckReport, check
from xl_export.demo.shipped import (
    MUSIC,
    STORIES,
    WIDTH,
    Flat,
    echo_title,
    find_shipped,
    measure_flat,
    play_music,
    write_text,
)

# Two beginnings, with seeds whose texts were chosen by hand. The model itself ends both texts.
OPENING = "Once upon a time"
OPENING_SEED = 271
OPENING_TOKENS = 120
STORY = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "One winter evening somebody knocked at the door. It was a bear."
)
STORY_SEED = 2
STORY_TOKENS = 200
MUSIC_SEED = 0
TEXT = "story.txt"


def run_demo(
    out: Path, *, train: bool = False, steps: int | None = None, force: bool = False
) -> dict[str, Any]:
    """Runs every step and prints what it does; returns the results of the table.

    The story is written to `out`/story.txt and the music to `out`/music.mid and `out`/music.wav. train:
    whether a small model is trained too, for `steps` steps, to `out`/run and `out`/artefact. A story and
    music that exist stay as they are, and a run or an artefact is refused, unless `force` is set. Without a
    trained model of `examples/` the demo has no story or no music. Raises UserError if nothing is left to
    show.
    """
    refuse_place(out)
    if train:  # a model may have been trained on since
        for name, kind in (("run", RUN), ("artefact", ARTEFACT)):
            refuse_existing(out / name, kind, force=force)
    stories = find_shipped()
    music = find_shipped(MUSIC)
    if stories is None:
        missing = f"{STORIES} is not here (its recipe is in {STORIES.parent})"
        if not train:
            raise UserError(
                f"{missing}, so there is no trained model to show; start the demo in a checkout of the "
                "repository, or give --train, and it trains a small model."
            )
        click.echo(f"{missing}, so the demo has only its small model")
    if train:
        from xl_export.demo.small_model import train_small_model  # it imports PyTorch
    with writing(out):  # a place that cannot be written is refused before the first word
        out.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(out / TEXT, option="--out", suffixes=(".txt",))
    results: dict[str, Any] = {"trained_model": None}
    lines = []
    passed = True
    if stories is not None:
        echo_title(
            "a trained model writes",
            f"{stories}, at most {OPENING_TOKENS} tokens; a small model, whose text was chosen: seed "
            f"{OPENING_SEED}, {read_sampling(stories)}",
        )
        report, flat = _show(stories)
        results["trained_model"] = {"check": report.to_json(), **to_json(flat)}
        lines += [_check_line("stories", report), _flat_line(flat)]
        passed = report.passed
    if train:
        small = train_small_model(out, steps=steps, force=force)
        results |= small.to_json()
        lines += [_check_line("artefact", small.report), *small.table()]
        passed = passed and small.report.passed
    click.echo("")
    for line in lines:
        click.echo(line)
    if stories is not None:
        echo_title(
            "a story",
            f"of the trained model, chosen by hand (seed {STORY_SEED}, {read_sampling(stories)}); it was "
            f"given the first three sentences{_kept(out / TEXT, force)}",
        )
        session = open_session(stories, device="cpu")
        story = write_text(session, STORY, tokens=STORY_TOKENS, seed=STORY_SEED)
        if force or not (out / TEXT).exists():
            with atomic_file(out / TEXT) as temporary:
                temporary.write_text(story + "\n", "utf-8")
    if music is not None:
        song = out / "music.wav"
        echo_title(
            "music",
            "four voices by another trained model, in the manner of Bach's chorales (seed "
            f"{MUSIC_SEED}){_kept(song, force)}",
        )
        if force or not song.exists():
            play_music(music, out / "music", seed=MUSIC_SEED, force=force)
    return {**results, "passed": passed}


def _kept(path: Path, force: bool) -> str:
    """The end of a title: where a result is kept."""
    if path.exists() and not force:
        return f". {path} stays as it is (--force replaces it)"
    return f". To keep: {path}"


def _show(stories: Path) -> tuple[CheckReport, Flat]:
    """Lets the trained model write, checks it, and measures what a token costs early and late in a stream."""
    session = open_session(stories, device="cpu")
    write_text(session, OPENING, tokens=OPENING_TOKENS, seed=OPENING_SEED)
    report = check(stories, device="cpu")
    flat = measure_flat(session)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}; a token took {flat.first:.2f} ms at the start "
        f"of a stream and {flat.last:.2f} ms after {flat.tokens:,} tokens; the memory is always "
        f"{flat.memory_bytes / 1e6:.1f} MB"
    )
    return report, flat


def _check_line(name: str, report: CheckReport) -> str:
    return (
        f"{f'{name} against {report.against}':<{WIDTH}}{'passed' if report.passed else 'FAILED'}: at most "
        f"{report.max_difference:.1e} nats apart"
    )


def _flat_line(flat: Flat) -> str:
    return (
        f"{'per token, stories':<{WIDTH}}{flat.first:.3f} ms at first, {flat.last:.3f} ms after "
        f"{flat.tokens:,} tokens, memory {flat.memory_bytes / 1e6:.1f} MB"
    )
