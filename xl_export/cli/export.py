"""`xl-export export`: a run as an artefact."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.options import declared
from runtimes.base.records import to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.options import json_option, options_of, show
from runtimes.contract.engine import Attention
from runtimes.contract.precision import Measured, named, per_stream, sentence
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from runtimes.contract.spec import Storage, load_spec
from runtimes.sessions.open import describe
from runtimes.tasks.check import check
from runtimes.tasks.describe import next_command
from xl_export.artefact.options import ExportOptions
from xl_export.cli.options import (
    PACKAGES,
    force_option,
    out_option,
    triton_backend_option,
    triton_option,
)

# What the option says: the attention for which the graph is written.
ATTENTION_AS: dict[str, Attention] = {"node": "plugin", "operators": "native"}


class Counts(click.ParamType):
    """Numbers that are separated by commas, such as `1,16`."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
            self.fail(f"{value!r:.40} is no list of numbers such as 1,16.", param, ctx)
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
@options_of(ExportOptions, attention=click.Choice(list(ATTENTION_AS)), tokens=Counts())
@options_of(MemoryRule, defaults=False, clamp_len=click.IntRange(0, MAX_LENGTH))
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
@triton_option
@triton_backend_option
@force_option
@json_option
def export_command(
    run: Path,
    out: Path,
    attention: str | None,
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
    given = {each.field.name: choices.pop(each.field.name) for each in declared(MemoryRule)}
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
            attention=ATTENTION_AS[attention] if attention else None,
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
