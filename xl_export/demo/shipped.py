"""The trained models in `examples/`, for the demo: finds them, and shows what they do."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from runtimes.contract.spec import SPEC
from runtimes.tasks.generate import generate

STORIES = Path("examples", "stories", "tales")
MUSIC = Path("examples", "music", "chorales")
WIDTH = 44  # columns of the left half of the table that the demo prints
TIMED_TOKENS = 200  # tokens at the beginning of a stream, and again late in one


@dataclass(frozen=True, kw_only=True)
class Flat:
    """What a token costs early and late in a stream."""

    first: float  # ms for a token at the beginning of a stream
    last: float  # ms for a token after `tokens` tokens
    tokens: int
    memory_bytes: int  # the stream's memory, which does not grow


def echo_title(step: str, what: str) -> None:
    """Prints the title of a step of the demo."""
    click.echo(f"\n== {step}: {what}")


def find_shipped(artefact: Path = STORIES) -> Path | None:
    """The folder of an artefact in the checkout that holds this file, or below the working folder, or None.

    The models are no part of an installed package: a device that runs another one need not carry them.
    """
    for top in (Path(__file__).parents[2], Path.cwd()):
        if (top / artefact / SPEC).is_file():
            return top / artefact
    return None


def write_text(session: Session, prompt: str, *, tokens: int, seed: int) -> str:
    """The prompt and what the model adds to it, printed as it is computed. The model may end it early."""
    text = prompt
    click.echo(text, nl=False)
    for piece in generate(session, prompt, max_tokens=tokens, seed=seed):
        click.echo(piece.text, nl=False)
        text += piece.text
    click.echo("")
    return text


def play_music(artefact: Path, out: Path, *, seconds: float = 30, seed: int = 0, force: bool = False) -> None:
    """Writes about this many seconds of music to out.mid and out.wav with the artefact's own program.

    seed: another one is another piece. force: whether files that exist are replaced.
    """
    program = [sys.executable, str(artefact.parent / "play.py"), str(artefact)]
    options = ["--seconds", str(seconds), "--seed", str(seed), "--out", str(out)]
    options += ["--force"] * force
    ended = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    if ended.returncode:
        # The last line is the sentence of the program, or what a traceback says in the end.
        said = ended.stderr.strip().splitlines() or [f"it ended with exit code {ended.returncode}."]
        raise UserError(f"{program[1]}: {said[-1].removeprefix('Error: ')}")
    click.echo(ended.stdout.strip())


def measure_flat(session: Session, *, tokens: int = 2000) -> Flat:
    """The cost of a token at the beginning of a stream and at a late position.

    The tokens of both are timed in turns, so that other work on the machine slows both alike.
    """
    ids = np.random.default_rng(0).integers(0, session.vocab.size, (1, tokens))
    memories = [session.start(1), session.start(1)]
    for at in range(0, tokens, session.rule.segment):
        session.predict(ids[:, at : at + session.rule.segment], memories[1])
    seconds = np.empty((min(TIMED_TOKENS, tokens), 2))
    for i, row in enumerate(seconds):
        for which in range(2):
            began = time.perf_counter()
            _, memories[which] = session.step(ids[:, i : i + 1], memories[which])
            row[which] = time.perf_counter() - began
    first, last = np.median(seconds, axis=0) * 1e3
    return Flat(
        first=float(first),
        last=float(last),
        tokens=tokens,
        memory_bytes=sum(tensor.nbytes for tensor in memories[0].tensors.values()),
    )
