"""`xl-export polygraphy` and `xl-export refit`: what surrounds an engine once it is built."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import needs
from runtimes.base.records import to_json
from runtimes.cli.options import json_option, show
from xl_export.cli.options import force_option, out_option


@click.command("polygraphy")
@click.argument("artefact", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--batch", type=click.IntRange(min=1), default=2, show_default=True, help="How many rows each step has."
)
@force_option
@json_option
def polygraphy_command(artefact: Path, out: Path, batch: int, force: bool, as_json: bool) -> None:
    """Write ARTEFACT's inputs and answers for Polygraphy.

    Polygraphy is NVIDIA's tool that runs a model in several runtimes and compares them. The folder holds the
    inputs of three steps, memory included, what the artefact answers on ONNX Runtime, memory included, and
    the command lines that compare the graph and an engine with it.
    """
    with needs("cpu", "onnxruntime"):
        from xl_export.deployment.polygraphy_files import COMMANDS, write_polygraphy_files
    steps = write_polygraphy_files(artefact, out, batch=batch, force=force)
    commands = (out / COMMANDS).read_text(encoding="utf-8").splitlines()
    lines = [f"{out} holds inputs and answers of {len(steps)} steps: {'; '.join(steps)}", *commands]
    show({"folder": str(out), "steps": steps, "commands": commands}, lines, as_json=as_json)


@click.command("refit")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("artefact", type=click.Path(path_type=Path))
@out_option
@force_option
@json_option
def refit_command(engine: Path, artefact: Path, out: Path, force: bool, as_json: bool) -> None:
    """Put ARTEFACT's weights into a copy of ENGINE.

    ENGINE must have been built with --refit, and ARTEFACT must have the same step as the artefact that ENGINE
    was built from: the same model sizes, memory rule, form of memory and precision. TensorRT keeps the
    kernels that it has chosen, so this takes seconds. It needs the GPU that the engine is for.
    """
    with needs("tensorrt", "onnx"):
        from xl_export.deployment.refit import refit
    facts = refit(engine, artefact, out, force=force)
    line = f"{out} is ready: the plan of {engine} with the weights of {artefact}, in {facts.seconds:.1f} s"
    next_line = f"next: xl-export check {out}"
    show({"engine": str(out), **to_json(facts)}, [line, next_line], as_json=as_json)
