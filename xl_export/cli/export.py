"""`xl-export export`: run to artefact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import click

from runtimes.base.errors import UserError, needs
from runtimes.contract.engine import Attention
from runtimes.contract.precision import QUANTISED, MemoryPrecision, Precision, per_stream, sentence
from runtimes.contract.rule import InitialMemory, Mask
from runtimes.contract.spec import Target, load_spec
from runtimes.contract.tensors import Form
from runtimes.tasks.check import check
from xl_export.cli.options import PACKAGES, force_option, out_option


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--memory",
    type=click.Choice(get_args(Form)),
    help="Memory tensors: keys and values in a ring written in place (fastest, the default), the same shifted by concatenation "
    "(TensorRT, older opsets), or the paper's hidden states (slow, for parity).",
)
@click.option(
    "--mem-len", type=click.IntRange(min=0), help="Tokens remembered (M); the run's own by default."
)
@click.option(
    "--segment",
    type=click.IntRange(min=1),
    help="The largest segment of one step (T); the run's own by default.",
)
@click.option(
    "--mask",
    type=click.Choice(get_args(Mask)),
    help="Every token sees M before it, or all that memory still holds.",
)
@click.option(
    "--clamp-len",
    type=click.IntRange(min=0),
    help="Largest distance with a position of its own; 0 for no clamp.",
)
@click.option(
    "--initial-memory",
    type=click.Choice(get_args(InitialMemory)),
    help="What precedes a text: nothing, or zeros that are seen.",
)
@click.option(
    "--target", type=click.Choice(get_args(Target)), default="onnxruntime", show_default=True,
    help="What the graph is for: tensorrt has shift memory and float16; ONNX Runtime runs it too.",
)  # fmt: skip
@click.option(
    "--attention", type=click.Choice(get_args(Attention)),
    help="For tensorrt: one node that our fused kernel takes (the default), or the engine's own kernels for standard operators.",
)  # fmt: skip
@click.option(
    "--precision", type=click.Choice(get_args(Precision)),
    help="Of the weights: fp16 is a smaller file; int8 and int4 make large models faster, and lose a little; fp32 by default.",
)  # fmt: skip
@click.option(
    "--memory-precision", type=click.Choice(get_args(MemoryPrecision)), show_default="fp32",
    help="Of the memory tensors: fp16 halves the bytes of a stream (`info` prints both), and pays with the fused kernel.",
)  # fmt: skip
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Held-out text to measure a precision on; the run's own test text by default.",
)
@force_option
def export_command(
    run: Path, out: Path, memory: str | None, target: str, attention: str | None, precision: str | None,
    memory_precision: str | None, text: Path | None, force: bool, **changes: Any,
) -> None:  # fmt: skip
    """Export RUN to an artefact, a folder that needs no PyTorch.

    It runs with NumPy and ONNX Runtime alone. The graph is compared with PyTorch at several shapes, and over chained
    segments through several wraps of the memory, before the folder appears. Rules that are not given are those that the
    run was evaluated with.
    """
    with needs("cpu,export", *PACKAGES):
        from trainer.run.checkpoint import load_run
        from xl_export.artefact.export import export
    rule = load_run(run).config.evaluation
    given = {key: value for key, value in changes.items() if value is not None}
    if given.get("clamp_len") == 0:
        given["clamp_len"] = None
    if attention and target != "tensorrt":
        raise UserError("--attention is for --target tensorrt; leave it out, or give both.")
    rule = dataclasses.replace(rule, **given)
    export(
        run, out, memory=memory, rule=rule, target=target, attention=attention or "plugin", precision=precision,  # type: ignore[arg-type]
        memory_precision=memory_precision, text=text, force=force,  # type: ignore[arg-type]
    )  # fmt: skip
    report, spec = check(out), load_spec(out)
    verdict = "is ready" if report.passed else "is written, but its check FAILED on this machine"
    proof = (
        "compared with PyTorch in fp32 before its weights were quantised"
        if spec.precision in QUANTISED
        else report.sentence
    )
    click.echo(
        f"{out} {verdict}: {spec.form} memory, {spec.rule}; {proof if report.passed else report.sentence}"
    )
    stream = (spec.bytes_per_stream, spec.fp32_bytes_per_stream) if spec.state_dtype == "float16" else None
    if spec.measured is not None:
        click.echo(sentence(spec.precision, spec.measured, stream=stream))
    elif spec.lossy:
        name = f"{spec.precision} with fp16 memory ({per_stream(*stream)})" if stream else spec.precision
        click.echo(f"{name} is not measured: {run} kept no test text; give one with --text FILE")
