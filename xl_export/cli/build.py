"""`xl-export build`: the engine of an artefact, for NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.records import to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.options import json_option, show
from runtimes.contract.engine import NAMES, PLAN, Attention, Flavour, Hardware
from xl_export.cli.options import force_option, out_option, triton_option


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
    "--flavour",
    type=click.Choice(get_args(Flavour)),
    default="tensorrt",
    show_default=True,
    help="tensorrt is TensorRT, which builds on the GPU that the engine is for. rtx is TensorRT-RTX, which "
    "builds on any machine; the engine is compiled on the device that opens it, and "
    "--compute-capability is needed.",
)
@click.option(
    "--attention",
    type=click.Choice(get_args(Attention)),
    default="native",
    show_default=True,
    help="What computes attention. native is TensorRT's own kernels. plugin is the project's Triton "
    "kernels, embedded in the plan; it needs --flavour tensorrt and an artefact of `xl-export export "
    "--target tensorrt`.",
)
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
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="The usual segment length, for which kernels are timed. The default is the artefact's longest.",
)
@click.option(
    "--hardware",
    type=click.Choice(get_args(Hardware)),
    default="same-gpu",
    show_default=True,
    help="The GPUs that the engine runs on, at some cost in speed: only this model, all of its compute "
    "capability, or all from Ampere on. It needs --flavour tensorrt.",
)
@click.option(
    "--version-compatible",
    is_flag=True,
    help="Let newer releases of the same major version run the engine. It needs --flavour tensorrt.",
)
@click.option(
    "--refit",
    is_flag=True,
    help="Let the weights of the finished engine be replaced. It needs --flavour tensorrt.",
)
@click.option(
    "--workspace-mib",
    type=click.IntRange(1, 1 << 20),
    help="How much scratch memory, in MiB, TensorRT's kernels may use. The default is all of the GPU's "
    "memory.",
)
@click.option(
    "--optimization-level",
    type=click.IntRange(0, 5),
    help="How long TensorRT searches for fast kernels: 0 is a quick build, 5 a thorough one. The default is "
    "TensorRT's own.",
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="A file of measured kernels that makes later builds quicker. It is created, or extended. It needs "
    "--flavour tensorrt and --attention native.",
)
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
        from xl_export.tensorrt.options import BuildOptions
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
