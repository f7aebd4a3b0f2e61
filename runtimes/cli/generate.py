"""`xl-export generate`: continues a text."""

from __future__ import annotations

import zipfile
from pathlib import Path

import click

from runtimes.base.errors import UserError
from runtimes.base.files import NPZ_ERRORS
from runtimes.cli.options import folder_argument, threads_option
from runtimes.contract.checks import load_memory
from runtimes.contract.memory import save_memory
from runtimes.sessions.open import open_session
from runtimes.tasks.generate import generate
from runtimes.tasks.sample import Sampler


@click.command("generate")
@folder_argument
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    help="The text to continue; give the option several times for a batch.",
)
@click.option(
    "--tokens",
    "max_tokens",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of tokens to generate.",
)
@click.option(
    "--temperature",
    default=1.0,
    show_default=True,
    help="Below 1 likely tokens become more likely, above 1 less; 0 always takes the likeliest.",
)
@click.option(
    "--top-k",
    default=40,
    show_default=True,
    type=click.IntRange(min=0),
    help="Draw from the k likeliest tokens; 0 means from all.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    help="Draw from the fewest likeliest tokens whose probabilities add up to this.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="The seed of the random numbers; the same seed gives the same text.",
)
@click.option(
    "--stop", multiple=True, help="Stop before this text appears; the option may be given several times."
)
@click.option(
    "--save-memory",
    "save_to",
    type=click.Path(path_type=Path),
    help="Write the memory of the streams to this file at the end.",
)
@click.option(
    "--load-memory",
    "load_from",
    type=click.Path(path_type=Path),
    help="Continue the streams whose memory is in this file.",
)
@threads_option
def generate_command(
    path: Path,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    save_to: Path | None,
    load_from: Path | None,
    threads: int | None,
) -> None:
    """Continue a text with the artefact or run at PATH.

    Each piece of text is printed as soon as it is computed; a batch is printed at the end. Every token costs
    the same, however long the text grows. By default tokens are drawn from the 40 likeliest, as in the paper
    on Transformer-XL.
    """
    if save_to and (save_to.is_dir() or not save_to.parent.is_dir()):
        raise UserError(
            f"{save_to} cannot be a file to save memory in; give a file name in a folder that exists."
        )
    if save_to and save_to.exists() and not _holds_streams(save_to):
        raise UserError(
            f"{save_to} exists and is no file of saved streams, so it is not replaced; give another "
            "--save-memory, or delete it first."
        )
    sampler = Sampler(temperature=temperature, top_k=top_k or None, top_p=top_p)
    session = open_session(path, threads=threads)
    memory = (
        load_memory(load_from, session) if load_from else session.start(len(prompts)) if save_to else None
    )
    pieces = generate(
        session, prompts, max_tokens=max_tokens, sampler=sampler, seed=seed, stop=stop, memory=memory
    )
    # Each word of a vocabulary of words brings the blank before it.
    shown = [prompt.rstrip(" ") if session.vocab.kind == "word" else prompt for prompt in prompts]
    if len(shown) == 1:
        click.echo(shown[0], nl=False)
        for piece in pieces:
            click.echo(piece.text, nl=False)
        click.echo()
    else:
        texts = shown
        for piece in pieces:
            texts[piece.row] += piece.text
        for row, text in enumerate(texts):
            click.echo(f"--- {row}\n{text}")
    if save_to and memory:
        save_memory(memory, save_to)


def _holds_streams(path: Path) -> bool:
    """Whether a file is what `save_memory` writes: an archive with an owner and positions."""
    try:
        if not path.is_file():  # reading from a pipe would wait for its other end
            return False
        with zipfile.ZipFile(path) as archive:
            return {"owner.npy", "positions.npy"} <= set(archive.namelist())
    except (*NPZ_ERRORS, OSError):
        return False
