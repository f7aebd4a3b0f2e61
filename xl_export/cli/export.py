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
RULE = ("mem_len", "segment", "mask", "clamp_len", "initial_memory")  # options that change the memory rule


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
    help="graph writes the ONNX graph node by node. trace lets PyTorch trace the step, as xl_export.trace "
    "does; it needs onnxscript, and heads with learned spans keep the whole memory.",
)
@click.option(
    "--memory",
    type=click.Choice(get_args(Form)),
    help="Form of the memory. ring writes keys and values in place: the fastest, and the default. shift "
    "moves them at each step, for older opsets and for engines of models that cannot use a ring. hidden "
    "keeps the hidden states, as in the paper; it is slow.",
)
@click.option(
    "--mem-len",
    type=click.IntRange(min=0),
    help="Tokens that the artefact remembers (M). Default: as in the run.",
)
@click.option(
    "--segment",
    type=click.IntRange(min=1),
    help="Most tokens in one step (T). Default: as in the run.",
)
@click.option(
    "--mask",
    type=click.Choice(get_args(Mask)),
    help="same-length: a token sees the M tokens before it. full: it sees all of the memory and of its "
    "segment before it. Default: as in the run.",
)
@click.option(
    "--clamp-len",
    type=click.IntRange(min=0),
    help="Largest distance with a position of its own; 0 for no limit. Default: as in the run.",
)
@click.option(
    "--initial-memory",
    type=click.Choice(get_args(InitialMemory)),
    help="What the first tokens of a text see before it: nothing (masked), or a memory of zeros. Default: as "
    "in the run.",
)
@click.option(
    "--target",
    type=click.Choice(get_args(Target)),
    default="onnxruntime",
    show_default=True,
    help="The runtime of the graph. tensorrt: a float16 graph; sessions cut a segment at the end of the "
    "ring. web: only operators that browsers compute on the GPU (WebGPU). ONNX Runtime runs all three.",
)
@click.option(
    "--attention-as",
    type=click.Choice(list(ATTENTION_AS)),
    help="node: one operator for the attention of a layer. With --target tensorrt (the default there) "
    "`xl-export build` replaces it by standard operators or by the Triton kernels; otherwise a second "
    "graph, cuda.onnx, launches one kernel per layer on the device cuda. operators: ONNX Attention, "
    "with --target tensorrt only; TensorRT has fused kernels for it, which add in float16.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="Precision of the weights. fp16 and int8-stored make the file smaller; int8-stored is loaded as "
    "fp32 if the runtime has no fast int8. int8 and int4 also make large models faster and lose some "
    "accuracy. Default: fp32, or fp16 with --target tensorrt.",
)
@click.option(
    "--memory-precision",
    type=click.Choice(get_args(MemoryPrecision)),
    show_default="fp32",
    help="Precision of the memory. fp16 halves the bytes of a stream at no cost in speed with the fused CPU "
    "operator. int8 halves them again; it needs ring memory, and is slow without the fused CPU "
    "operator.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Held-out text on which the loss of a lower precision is measured. By default the test text of the "
    "run.",
)
@click.option(
    "--single-file",
    is_flag=True,
    help="Put the weights into step.onnx, for browsers and apps: one file of at most 2 GB, without a graph "
    "for the fused CPU operator.",
)
@click.option(
    "--ort",
    is_flag=True,
    help="Write graph and weights as step.ort, the format of ONNX Runtime for mobile, and "
    "required_operators.config for a reduced build of it.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, MAX_BATCH),
    help="With --exporter trace: fix all sizes, as the accelerators of phones need it. Each step has exactly "
    "this many rows of --segment tokens.",
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
    attention_as: str | None,
    single_file: bool,
    ort: bool,
    triton: Path | None,
    triton_backend: str,
    force: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Export RUN to an artefact, a folder that needs no PyTorch.

    The artefact runs with only NumPy and ONNX Runtime. Before the folder appears, its graphs are compared
    with PyTorch at several shapes and over a stream of many segments that is much longer than the memory. A
    graph that this machine cannot run is not compared, and the output names it. Options that are not given
    have the values with which the run was evaluated. The exit code is 1 if the artefact is written and its
    check fails on this machine.
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
    if single_file and ort:
        raise UserError("--ort writes one file already, step.ort; leave out --single-file.")
    session = triton_backend == "python"
    if ort and triton and not session:
        raise UserError("--triton needs the graph as step.onnx; leave out --ort.")
    if session and (choices["memory"] not in (None, "ring") or choices["target"] == "web"):
        raise UserError(
            "--triton-backend python needs memory that is written in place; give --memory ring and another "
            "target than web."
        )
    storage: Storage = "single-file" if single_file else "ort" if ort else "external"
    given = {name: choices.pop(name) for name in RULE}
    changes = {name: value for name, value in given.items() if value is not None}
    if choices["tokens"]:
        changes.setdefault("segment", max(choices["tokens"]))
    if changes.get("clamp_len") == 0:
        changes["clamp_len"] = None
    if triton:  # refused before anything is exported
        model_folder(out, triton, force=force)
    rule = dataclasses.replace(load_run(run).config.evaluation, **changes) if changes else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FailingCheckWarning)  # the check below says it
        export(
            run,
            out,
            rule=rule,
            attention=ATTENTION_AS[attention_as] if attention_as else None,
            storage=storage,
            force=force,
            **choices,
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
        lines.append(f"{name} is not measured: its steps take whole segments only")
    if spec.not_compared:
        lines.append(
            f"{', '.join(spec.not_compared)}: not compared with PyTorch, because this machine cannot run it; "
            "run `xl-export check` on one that can"
        )
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
        "not_compared": list(spec.not_compared),
        "check": report.to_json(),
        "triton": str(model) if model else None,
    }
    show(document, lines, as_json=as_json)
    if not report.passed:
        raise SystemExit(1)
