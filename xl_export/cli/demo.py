"""`xl-export demo`: the whole path in one command."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from runtimes.base.errors import needs
from runtimes.cli.options import echo_json, json_option
from xl_export.cli.options import PACKAGES, force_option


@click.command("demo")
@click.option(
    "--out",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The folder that the run and the artefact are written to.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="The number of training steps; 1,000 by default, half of those of the demo configuration.",
)
@force_option
@json_option
def demo_command(out: Path, steps: int | None, force: bool, as_json: bool) -> None:
    """Show the whole path in a few minutes.

    Where the trained model of examples/stories is there, it writes first, and is checked. Then the demo
    trains a small character model on a built-in corpus, exports it and checks the artefact. It scores the
    model with and without memory, in PyTorch and in ONNX Runtime, and compares its speed with that of a
    sliding window. At the end the trained model of stories writes a story, and that of examples/music plays
    half a minute of music (MIDI and WAV), each where it is there.
    """
    with needs("demo", *PACKAGES, "tokenizers"):
        demo = import_module("benchmarks.showcase.demo")  # by name: the benchmarks import this package
    figures = demo.run_demo(out, steps=steps, force=force)
    echo_json(figures, as_json)
    if not figures["passed"]:
        raise SystemExit(1)
