"""`xl-export demo`: something to show at once, and on request the whole path in one command."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import needs
from runtimes.cli.options import json_option, show, text_as_progress
from xl_export.cli.options import PACKAGES


@click.command("demo")
@click.option(
    "--out",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The folder that the story and the music are written to, and the run and the artefact of --train.",
)
@click.option(
    "--train",
    is_flag=True,
    help="Also train a small model, export it, check and score it, and compare its speed with a "
    "sliding window. It takes about a minute.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="The number of training steps of --train; 500 by default, a quarter of the configuration's own.",
)
@click.option("--force", is_flag=True, help="Replace the results of an earlier demo.")
@json_option
def demo_command(out: Path, train: bool, steps: int | None, force: bool, as_json: bool) -> None:
    """Show what trained models do, within seconds.

    The trained model of examples/stories writes, is checked, and shows what a token costs at the beginning
    of a stream and late in it. Then it writes a story to keep, and the model of examples/music plays 40
    seconds of music (MIDI and WAV). This needs no PyTorch.

    With --train the whole path follows on a small character model and a built-in corpus: train, export,
    check, score with and without memory in PyTorch and in ONNX Runtime, and measure.
    """
    if steps is not None and not train:
        raise click.UsageError("--steps is the number of training steps; give --train too.")
    with needs("demo" if train else "cpu,subword", *PACKAGES, "tokenizers"):
        from xl_export.demo.run import run_demo

        with text_as_progress(as_json):
            results = run_demo(out, train=train, steps=steps, force=force)
    show(results, [], as_json=as_json)
    if not results["passed"]:
        raise SystemExit(1)
