"""`xl-export refit`: the weights of another artefact in an engine."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import needs
from xl_export.cli.options import force_option, out_option


@click.command("refit")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("artefact", type=click.Path(path_type=Path))
@out_option
@force_option
def refit_command(engine: Path, artefact: Path, out: Path, force: bool) -> None:
    """Put ARTEFACT's weights into a copy of ENGINE.

    ENGINE must have been built with --refit, and ARTEFACT must have the same step as the artefact that ENGINE
    was built from: the same model sizes, memory rule, form of memory and precision. TensorRT keeps the
    kernels that it has chosen, so this takes seconds. It needs the GPU that the engine is for.
    """
    with needs("tensorrt", "onnx"):
        from xl_export.deployment.refit import refit
    facts = refit(engine, artefact, out, force=force)
    click.echo(
        f"{out} is ready: the plan of {engine} with the weights of {artefact}, in {facts.seconds:.1f} s; "
        f"check it: xl-export check {out}"
    )
