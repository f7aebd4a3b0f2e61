"""`xl-export polygraphy`: inputs and answers for NVIDIA's tool that compares runtimes."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import needs
from xl_export.cli.options import force_option, out_option


@click.command("polygraphy")
@click.argument("artefact", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--batch", type=click.IntRange(min=1), default=2, show_default=True, help="How many rows each step has."
)
@force_option
def polygraphy_command(artefact: Path, out: Path, batch: int, force: bool) -> None:
    """Write ARTEFACT's inputs and answers for Polygraphy.

    Polygraphy is NVIDIA's tool that runs a model in several runtimes and compares them. The folder holds the
    inputs of three steps, memory included, what the artefact answers on ONNX Runtime, memory included, and
    the command lines that compare the graph and an engine with it.
    """
    with needs("cpu", "onnxruntime"):
        from xl_export.deployment.polygraphy_files import COMMANDS, write_polygraphy_files
    steps = write_polygraphy_files(artefact, out, batch=batch, force=force)
    click.echo(f"{out} holds inputs and answers of {len(steps)} steps: {'; '.join(steps)}")
    click.echo((out / COMMANDS).read_text(encoding="utf-8"), nl=False)
