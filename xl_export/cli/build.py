"""`xl-export build`: the engine of an artefact, for NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.records import to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.options import json_option, options_of, show
from runtimes.contract.engine import NAMES, PLAN
from xl_export.cli.options import force_option, out_option, triton_option
from xl_export.tensorrt.options import BuildOptions


class Sizes(click.ParamType):
    """An option's value such as `8`, or `1:4:16` for least, usual and most."""

    name = "N|N:N:N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        parts = str(value).split(":")
        if len(parts) not in (1, 3) or not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise UserError(
                f"{param.opts[0]} is {value!r:.40}; expected one number, or least:usual:most such as 1:4:16."
            )
        sizes = tuple(int(part) for part in parts)
        return sizes * 3 if len(sizes) == 1 else sizes


@click.command(
    "build",
    cls=LongCommand,
    sections={
        "Main options": "--out --flavour --compute-capability --attention --force",
        "Shapes": "--batch --token-batch --tokens",
        "Where the engine runs": "--hardware --version-compatible --refit",
        "Tuning": "--optimization-level --workspace-mib --timing-cache",
    },
)
@click.argument("artefact", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--compute-capability",
    metavar="8.6,12.0,…",
    help="The compute capabilities of the GPUs that the engine is for. It is needed with --flavour rtx and "
    "refused without it.",
)
@click.option(
    "--batch",
    type=Sizes(),
    default="1:1:8",
    show_default=True,
    help="How many rows a step has while segments are scored: least:usual:most, or one number.",
)
@click.option(
    "--token-batch",
    type=Sizes(),
    help="How many rows a step has while single tokens are generated. The default is the number of --batch.",
)
@options_of(BuildOptions)
@triton_option
@force_option
@json_option
def build_command(
    artefact: Path,
    out: Path,
    compute_capability: str | None,
    triton: Path | None,
    force: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Build the TensorRT engine of ARTEFACT, for NVIDIA GPUs.

    An engine is a folder that runs with TensorRT and NumPy, without PyTorch. ARTEFACT is best exported with
    `xl-export export --target tensorrt`; another with shift memory in fp32 or fp16 works too. The
    engine has two optimisation profiles, one for segments and one for single tokens. The folder also holds
    the command line with which NVIDIA's own tool builds the same plan.
    """
    with needs("tensorrt", "onnx", "tqdm"):
        from xl_export.tensorrt.build import build
        from xl_export.tensorrt.trtexec import LINE
    capabilities = tuple(
        dict.fromkeys(part.strip() for part in (compute_capability or "").split(",") if part.strip())
    )
    options = BuildOptions(compute_capabilities=capabilities, **choices)
    if triton:  # refused before anything is built
        with needs("tensorrt,export", "onnx_ir"):
            from xl_export.deployment.model_repository import model_folder, write_engine
        if options.flavour != "tensorrt":
            raise UserError(
                "--triton is for --flavour tensorrt, since Triton Inference Server runs no engines of "
                "TensorRT-RTX; leave it out."
            )
        model_folder(out, triton, force=force)
    facts = build(artefact, out, options, force=force)
    model = write_engine(artefact, triton, options, name=out, force=force) if triton else None
    where = f"tuned on {facts.gpu.name}" if facts.gpu else "to be compiled on the GPU that opens it"
    size = facts.files[PLAN].num_bytes / 2**20
    lines = [
        f"{out} is ready: {NAMES[facts.flavour]} {facts.version}, {size:,.1f} MiB in {facts.seconds:.1f} s, "
        f"for compute capability {', '.join(facts.compute_capabilities)}, {where}; {facts.attention} "
        f"attention, {facts.plugin_layers} plugin layers of {sum(facts.layers.values())} layers; check it "
        f"on the device: xl-export check {out}",
        f"{out / LINE} holds the command line of NVIDIA's own tool for the same plan",
        *([f"{model} is a model for Triton Inference Server"] if model else []),
    ]
    document = {"engine": str(out), "triton": str(model) if model else None, **to_json(facts)}
    show(document, lines, as_json=as_json)
