"""`xl-export export`: a run as an artefact."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from runtimes.base.errors import UserError, needs
from runtimes.base.files import read_json
from runtimes.base.folders import refuse_no_folder
from runtimes.base.options import declared
from runtimes.base.records import to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.options import json_option, options_of, show
from runtimes.contract.engine import Attention
from runtimes.contract.precision import Measured, named, per_stream, sentence
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from runtimes.contract.spec import FUSED, Storage, load_spec
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
RULE = [each.field.name for each in declared(MemoryRule)]
# Options that a model of Hugging Face has no use for: it is traced, and its memory is its own.
FOR_RUNS = {"exporter", "memory", "attention", "single_file", "ort", "fused_ort", *RULE} - {"segment"}


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
        "Memory": "--mem-len --segment --window --memory --memory-precision --mask --clamp-len "
        "--initial-memory",
        "Form of the graph": "--single-file --ort --exporter --rows --tokens --attention-as",
        "Triton Inference Server": "--triton --triton-backend",
    },
)
@click.argument("run", type=click.Path(path_type=Path))
@out_option
@options_of(ExportOptions, attention=click.Choice(list(ATTENTION_AS)), tokens=Counts())
@options_of(MemoryRule, defaults=False, clamp_len=click.IntRange(0, MAX_LENGTH))
@click.option(
    "--window",
    type=click.IntRange(min=2),
    help="For a model of Hugging Face whose memory grows: the number of tokens that a token sees in layers "
    "with full attention. The artefact equals the model for texts of at most that length.",
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
    "--fused-ort",
    is_flag=True,
    help="The same as fused.ort, which needs the fused CPU operator on the device and hardly any other.",
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
    fused_ort: bool,
    triton: Path | None,
    triton_backend: str,
    force: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Export RUN to an artefact, a folder that needs no PyTorch.

    RUN is the folder of a run, or of a causal language model of Hugging Face with a memory that is bounded,
    such as Mamba, Gemma or LFM2: config.json, model.safetensors and tokenizer.json. Nothing is downloaded,
    and no code in the folder is run. Its steps have up to 16 tokens, unless --segment is given.

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
    refuse_no_folder(run, give="a run, or the folder of a model that `hf download` wrote")
    pretrained = _is_pretrained(run)
    if pretrained:
        _refuse_given(FOR_RUNS, f"is for a run, and {run} is a model of Hugging Face")
    else:
        _refuse_given(["window"], f"is for a model of Hugging Face, and {run} is a run")
    with needs("cpu,export", *PACKAGES):
        from xl_export.artefact.validate import FailingCheckWarning
        from xl_export.deployment.model_repository import model_folder, write_model, write_session
    storages: dict[Storage, bool] = {"single-file": single_file, "ort": ort, "fused-ort": fused_ort}
    chosen = [name for name, given in storages.items() if given]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} write different files; give one of them.")
    storage = chosen[0] if chosen else "external"
    session = triton_backend == "python"
    if (ort or fused_ort) and triton and not session:
        raise UserError(f"--triton needs the graph as step.onnx; leave out --{storage}.")
    if session and (choices["memory"] not in (None, "ring") or choices["target"] == "web"):
        raise UserError(
            "--triton-backend python needs memory that is written in place; give --memory ring and another "
            "target than web."
        )
    if triton:  # refused before anything is exported
        model_folder(out, triton, force=force)
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FailingCheckWarning)  # the check below says it
        if pretrained:
            notes = _export_pretrained(run, out, force=force, **choices)
        else:
            attention_as = ATTENTION_AS[attention] if attention else None
            _export_run(run, out, attention=attention_as, storage=storage, force=force, **choices)
    report = check(out, device="cpu")
    spec = load_spec(out)
    if spec.concern:
        click.echo(f"Warning: {spec.concern}", err=True)
    verdict = "is written" if spec.concern else "is ready"
    if not report.passed:
        verdict = "is written, but its check FAILED on this machine"
    lines = [f"{out} {verdict}: {spec.form} memory, {spec.rule}; {report.sentence}"]
    if spec.original_difference is not None:
        only = (
            f", for texts of up to {spec.equals_up_to:,} tokens; it forgets the beginning of longer ones"
            if spec.equals_up_to
            else ""
        )
        lines.append(f"it agrees with the model's own loop to {spec.original_difference:.1e} nats{only}")
    stream = spec.bytes_per_stream, spec.fp32_bytes_per_stream
    stored = spec.memory_precision
    if isinstance(spec.measured, Measured):
        lines.append(sentence(spec.precision, stored, spec.measured, stream=stream))
    elif spec.lossy:
        name = named(spec.precision, stored) + (f" ({per_stream(*stream)})" if stored != "fp32" else "")
        lines.append(
            f"{name} is not measured, because its steps take only whole segments; give a longer --text FILE"
        )
    if spec.not_compared:
        here = " after `xl-export fused-kernel`, or" if spec.not_compared == (FUSED,) else ""
        lines.append(
            f"{', '.join(spec.not_compared)}: not compared with PyTorch, because this machine cannot run it; "
            f"run `xl-export check`{here} on one that can"
        )
    model = None
    if triton and report.passed:
        model = (write_session if session else write_model)(out, triton, force=force)
        lines.append(f"{model} is a model for Triton Inference Server")
    lines += [f"note: {note}" for note in notes]
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
        "original_difference": spec.original_difference,
        "equals_up_to": spec.equals_up_to,
        "not_compared": list(spec.not_compared),
        "check": report.to_json(),
        "triton": str(model) if model else None,
        "notes": notes,
    }
    show(document, lines, as_json=as_json)
    if not report.passed:
        raise SystemExit(1)


def _is_pretrained(folder: Path) -> bool:
    """Whether a folder has the `config.json` of a model of Hugging Face; a run's has no `model_type`."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def _refuse_given(options: Collection[str], why: str) -> None:
    """Raises UserError if the user has typed one of these options."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name in options and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"{option.opts[0]} {why}; leave it out.")


def _export_run(run: Path, out: Path, *, window: None, **choices: Any) -> None:
    """Exports the folder of a run. choices: the options; those of the rule replace parts of the run's own."""
    from trainer.run.checkpoint import load_run
    from xl_export.artefact.export import export

    changes = {name: value for name in RULE if (value := choices.pop(name)) is not None}
    if choices["tokens"]:
        changes.setdefault("segment", max(choices["tokens"]))
    if changes.get("clamp_len") == 0:
        changes["clamp_len"] = None
    rule = dataclasses.replace(load_run(run).config.evaluation, **changes) if changes else None
    export(run, out, rule=rule, **choices)


def _export_pretrained(folder: Path, out: Path, **choices: Any) -> list[str]:
    """Exports the folder of a model of Hugging Face, and returns notes. choices: the options."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when its packages are imported
    for name in FOR_RUNS & choices.keys():
        del choices[name]
    with needs("cpu,export,trace,transformers", *PACKAGES, "onnxscript", "transformers", "tokenizers"):
        from xl_export.artefact.pretrained import export_pretrained

        return export_pretrained(folder, out, **choices)
