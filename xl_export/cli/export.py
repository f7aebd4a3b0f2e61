"""`xl-export export`: a run as an artefact."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any, get_args

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.records import to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.options import json_option, show
from runtimes.contract.engine import Attention
from runtimes.contract.memory import MAX_BATCH
from runtimes.contract.precision import (
    Measured,
    MemoryPrecision,
    Precision,
    named,
    per_stream,
    sentence,
)
from runtimes.contract.rule import InitialMemory, Mask
from runtimes.contract.spec import Exporter, Storage, Target, load_spec
from runtimes.contract.tensors import Form
from runtimes.sessions.open import describe
from runtimes.tasks.check import check
from runtimes.tasks.describe import next_command
from xl_export.cli.options import (
    PACKAGES,
    force_option,
    out_option,
    triton_backend_option,
    triton_option,
)

# What the option says: the attention for which the graph is written.
ATTENTION_AS: dict[str, Attention] = {"node": "plugin", "operators": "native"}


def _counts(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Numbers that are separated by commas."""
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
        raise click.BadParameter(f"{value!r:.40} is no list of numbers such as 1,16.", ctx, option)
    return tuple(map(int, value.split(",")))


@click.command(
    "export",
    cls=LongCommand,
    sections={
        "Main options": "--out --precision --text --target --force",
        "Memory": "--mem-len --segment --memory --memory-precision --mask --clamp-len --initial-memory",
        "Form of the graph": "--single-file --ort --exporter --rows --tokens --attention-as",
        "Triton Inference Server": "--triton --triton-backend",
    },
)
@click.argument("run", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--exporter",
    type=click.Choice(get_args(Exporter)),
    default="graph",
    show_default=True,
    help="What writes the graph. graph writes it node by node. trace has PyTorch trace its own step, as "
    "xl_export.trace does with a module of yours; it needs the package onnxscript, and every head keeps the "
    "whole memory, even if it learned a shorter span.",
)
@click.option(
    "--memory",
    type=click.Choice(get_args(Form)),
    help="The form of the memory tensors. ring writes keys and values in place and is the fastest and the "
    "default. shift moves them at each step, for older opsets, and for engines of models that cannot have a "
    "ring there. hidden holds the hidden states, as the paper does; it is slow and serves for comparison.",
)
@click.option(
    "--mem-len",
    type=click.IntRange(min=0),
    help="How many tokens the artefact remembers (M). The default is the run's own number.",
)
@click.option(
    "--segment",
    type=click.IntRange(min=1),
    help="The most tokens of one step (T). The default is the run's own number.",
)
@click.option(
    "--mask",
    type=click.Choice(get_args(Mask)),
    help="Which keys are visible to a token. With same-length these are the M tokens before it; with full, "
    "everything that the memory holds. The default is the run's own mask.",
)
@click.option(
    "--clamp-len",
    type=click.IntRange(min=0),
    help="The largest distance that has a position of its own; 0 means no limit. The default is the run's "
    "own limit.",
)
@click.option(
    "--initial-memory",
    type=click.Choice(get_args(InitialMemory)),
    help="What precedes the first token of a text. With masked nothing is visible there; with zeros, a "
    "memory full of zeros is. The default is the run's own choice.",
)
@click.option(
    "--target",
    type=click.Choice(get_args(Target)),
    default="onnxruntime",
    show_default=True,
    help="What the graph is written for. A graph for tensorrt is in float16, and its ring is never written "
    "across its end: sessions cut a segment there. A graph for web has operators that browsers compute on "
    "the GPU (WebGPU). ONNX Runtime runs both too.",
)
@click.option(
    "--attention-as",
    type=click.Choice(list(ATTENTION_AS)),
    help="How a graph for tensorrt writes attention. node, the default, is one operator that carries its own "
    "definition in standard operators; `xl-export build` uses either that or the project's Triton "
    "kernels for it. operators is ONNX Attention, for which TensorRT has fused kernels; its sums are in "
    "float16 too. With --target onnxruntime, node writes a second graph, cuda.onnx, in which each layer's "
    "attention is one kernel launch on the device cuda.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="The precision of the weights. fp16 makes the file smaller. int8-stored makes it smaller still, and "
    "loading widens it to fp32: for browsers, and wherever an engine has no fast int8. int8 and int4 make "
    "large models faster and lose some accuracy. The default is fp32, or fp16 with --target tensorrt.",
)
@click.option(
    "--memory-precision",
    type=click.Choice(get_args(MemoryPrecision)),
    show_default="fp32",
    help="The precision of the memory tensors. fp16 halves the bytes of a stream, which `xl-export info` "
    "prints; it costs no speed with the fused CPU operator. int8 halves them once more, but for a float32 "
    "scale of each key and value of a head; it is for ring memory, and slow without the fused CPU operator.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="A held-out text on which a reduced precision is measured. The default is the run's own test text.",
)
@click.option(
    "--single-file",
    is_flag=True,
    help="Write the weights into step.onnx, so that the model is one file, for browsers and apps. It holds "
    "at most 2 GB, and no graph for the fused CPU operator is written.",
)
@click.option(
    "--ort",
    is_flag=True,
    help="Write the graph and its weights as step.ort, in ONNX Runtime's own format for mobile, and the "
    "operators that it needs as required_operators.config.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, MAX_BATCH),
    help="With --exporter trace: write a graph without sizes that vary, as the engines of phones need. Every "
    "step has so many rows, and exactly --segment tokens in each.",
)
@click.option(
    "--tokens",
    metavar="LIST",
    callback=_counts,
    help="With --rows: write a graph for each of these numbers of tokens, such as 1,16, over one file of "
    "weights. The largest is --segment. A step may then have any number of tokens up to it.",
)
@triton_option
@triton_backend_option
@force_option
@json_option
def export_command(
    run: Path,
    out: Path,
    exporter: Exporter,
    memory: Form | None,
    target: Target,
    attention_as: str | None,
    precision: Precision | None,
    memory_precision: MemoryPrecision | None,
    text: Path | None,
    single_file: bool,
    ort: bool,
    rows: int | None,
    tokens: tuple[int, ...] | None,
    triton: Path | None,
    triton_backend: str,
    force: bool,
    as_json: bool,
    **changes: Any,
) -> None:
    """Export RUN to an artefact, a folder that needs no PyTorch.

    The artefact runs with only NumPy and ONNX Runtime. Before the folder appears, its graph is compared with
    PyTorch at several shapes and over a stream of many segments that is much longer than the memory. Options
    that are not given have the values with which the run was evaluated. The exit code is 1 if the artefact
    is written and its check fails on this machine.
    """
    if run.is_file():
        raise UserError(
            f"{run} is a file, expected the folder of a run; make one of a known project's checkpoint with "
            f"`xl-export import {run} --out RUN`, or export a model of your own code with xl_export.trace "
            "(docs/guides/own-model.md)."
        )
    with needs("cpu,export", *PACKAGES):
        from trainer.run.checkpoint import load_run
        from xl_export.artefact.export import export
        from xl_export.artefact.validate import FailingCheckWarning
        from xl_export.deployment.model_repository import model_folder, write_model, write_session
    attention = ATTENTION_AS[attention_as] if attention_as else None
    if single_file and ort:
        raise UserError("--ort writes one file already, step.ort; leave out --single-file.")
    session = triton_backend == "python"
    if ort and triton and not session:
        raise UserError("--triton needs the graph as step.onnx; leave out --ort.")
    if session and (memory not in (None, "ring") or target == "web"):
        raise UserError(
            "--triton-backend python needs memory that is written in place; give --memory ring and another "
            "target than web."
        )
    storage: Storage = "single-file" if single_file else "ort" if ort else "external"
    overrides = {key: value for key, value in changes.items() if value is not None}
    if tokens:
        overrides.setdefault("segment", max(tokens))
    if overrides.get("clamp_len") == 0:
        overrides["clamp_len"] = None
    if triton:  # refused before anything is exported
        model_folder(out, triton, force=force)
    rule = dataclasses.replace(load_run(run).config.evaluation, **overrides) if overrides else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FailingCheckWarning)  # the check below says it
        export(
            run,
            out,
            exporter=exporter,
            memory=memory,
            rule=rule,
            target=target,
            attention=attention,
            precision=precision,
            memory_precision=memory_precision,
            text=text,
            storage=storage,
            rows=rows,
            tokens=tokens,
            force=force,
        )
    report = check(out, device="cpu")
    spec = load_spec(out)
    if spec.concern:
        click.echo(f"Warning: {spec.concern}", err=True)
    verdict = "is written" if spec.concern else "is ready"
    if not report.passed:
        verdict = "is written, but its check FAILED on this machine"
    lines = [f"{out} {verdict}: {spec.form} memory, {spec.rule}; {report.sentence}"]
    stream = spec.bytes_per_stream, spec.fp32_bytes_per_stream
    stored = spec.memory_precision
    if isinstance(spec.measured, Measured):
        lines.append(sentence(spec.precision, stored, spec.measured, stream=stream))
    elif spec.lossy:
        name = named(spec.precision, stored) + (f" ({per_stream(*stream)})" if stored != "fp32" else "")
        lines.append(f"{name} is not measured, because {run} kept no test text; give one with --text FILE")
    model = None
    if triton and report.passed:
        model = (write_session if session else write_model)(out, triton, force=force)
        lines.append(f"{model} is a model for Triton Inference Server")
    if report.passed:
        lines.append(f"next: {next_command(describe(out), out)}")
    document = {
        "artefact": str(out),
        "identity": spec.identity,
        "memory_form": spec.form,
        "rule": to_json(spec.rule),
        "precision": spec.precision,
        "memory_precision": stored,
        "bytes_per_stream": spec.bytes_per_stream,
        "measured": None if spec.measured is None else to_json(spec.measured),
        "concern": spec.concern,
        "check": report.to_json(),
        "triton": str(model) if model else None,
    }
    show(document, lines, as_json=as_json)
    if not report.passed:
        raise SystemExit(1)
