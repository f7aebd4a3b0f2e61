"""`xl-export build`: an artefact as an engine for NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.records import to_json
from runtimes.cli.options import echo_json, json_option
from runtimes.contract.engine import NAMES, PLAN, Attention, Flavour, Hardware


class Sizes(click.ParamType):
    """`8`, or `1:4:16`: least, usual and most."""

    name = "N|N:N:N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        parts = str(value).split(":")
        if len(parts) not in (1, 3) or not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise UserError(
                f"{param.opts[0]} is {value!r:.40}; expected one number, or least:usual:most such as 1:4:16."
            )
        sizes = tuple(int(part) for part in parts)
        return sizes * 3 if len(sizes) == 1 else sizes


@click.command("build")
@click.argument("artefact", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The engine folder to write.")
@click.option(
    "--flavour",
    type=click.Choice(get_args(Flavour)),
    default="tensorrt",
    show_default=True,
    help="TensorRT, built on the GPU that it is for; or TensorRT-RTX, built anywhere, compiled on the device, and in need of "
    "--compute-capability.",
)
@click.option(
    "--attention",
    type=click.Choice(get_args(Attention)),
    default="native",
    show_default=True,
    help="TensorRT's own kernels; or the project's kernel, embedded in the plan, with --flavour tensorrt and an artefact of "
    "`--target tensorrt`.",
)
@click.option(
    "--compute-capability",
    metavar="8.6,12.0,…",
    help="For --flavour rtx, which needs it: the GPUs that the engine is for.",
)
@click.option(
    "--batch",
    type=Sizes(),
    default="1:1:8",
    show_default=True,
    help="Rows while scoring segments, least:usual:most.",
)
@click.option("--token-batch", type=Sizes(), help="Rows while generating; those of --batch by default.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="The usual segment to tune for; the artefact's largest by default.",
)
@click.option(
    "--hardware",
    type=click.Choice(get_args(Hardware)),
    default="same-gpu",
    show_default=True,
    help="GPUs that the engine is to run on, at some cost in speed: this model alone, its compute capability, or all from "
    "Ampere on. With --flavour tensorrt.",
)
@click.option(
    "--version-compatible",
    is_flag=True,
    help="Newer releases of the same major version run it too. With --flavour tensorrt.",
)
@click.option(
    "--refit", is_flag=True, help="Weights can be replaced in the finished engine. With --flavour tensorrt."
)
@click.option(
    "--workspace-mib",
    type=click.IntRange(1, 1 << 20),
    help="Scratch memory for the fastest kernels; all by default.",
)
@click.option("--optimization-level", type=click.IntRange(0, 5), help="0 quick build to 5 thorough.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="A file of measured kernels, made or added to, that makes later builds quicker. With --flavour tensorrt.",
)
@click.option("--force", is_flag=True, help="Replace the folder if it holds an earlier engine.")
@json_option
def build_command(
    artefact: Path, out: Path, compute_capability: str | None, force: bool, as_json: bool, **given: Any
) -> None:
    """Build the TensorRT engine of ARTEFACT, for NVIDIA GPUs.

    It is a folder that runs with TensorRT, NumPy and no PyTorch.
    The artefact is one that `xl-export export --target tensorrt` wrote; others with shift memory and weights in fp32 or fp16
    do too. The engine has two optimisation profiles, for segments and for single tokens. The folder holds the line for
    NVIDIA's own tool too.
    """
    with needs("tensorrt", "onnx", "tqdm"):
        from xl_export.tensorrt.build import build
        from xl_export.tensorrt.options import BuildOptions
        from xl_export.tensorrt.trtexec import LINE
    capabilities = tuple(
        dict.fromkeys(part.strip() for part in (compute_capability or "").split(",") if part.strip())
    )
    options = BuildOptions(compute_capabilities=capabilities, **given)
    facts = build(artefact, out, options, force=force)
    where = f"tuned on {facts.gpu.name}" if facts.gpu else "to be compiled on the GPU that opens it"
    size = facts.files[PLAN].num_bytes / 2**20
    click.echo(
        f"{out} is ready: {NAMES[facts.flavour]} {facts.version}, {size:,.1f} MiB in {facts.seconds:.1f} s, for compute "
        f"capability {', '.join(facts.compute_capabilities)}, {where}; {facts.attention} attention, {facts.plugin_layers} "
        f"plugin layers of {sum(facts.layers.values())} layers; check it on the device: xl-export check {out}"
    )
    click.echo(f"the same for NVIDIA's own tool is the line in {out / LINE}")
    echo_json(to_json(facts), as_json)
