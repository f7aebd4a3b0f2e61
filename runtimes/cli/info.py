"""`xl-export info`: what an artefact, an engine or a run is."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.cli.options import echo, echo_json, folder_argument, json_option
from runtimes.sessions import fused_cpu
from runtimes.sessions.open import describe
from runtimes.tasks.describe import describe_lines


@click.command("info")
@folder_argument
@json_option
def info_command(path: Path, as_json: bool) -> None:
    """Print what the artefact or run at PATH is.

    That is the model and its parameters, the form of its memory and the bytes per stream, the mask rule, the
    precision, what computes a step, the hashes, and every tensor of the graph with its shape.
    """
    facts = describe(path)
    if facts.get("fused_graph") and (sentence := fused_cpu.ignored()):
        facts["fused_kernel_ignored"] = sentence
    for line in describe_lines(facts):
        echo(line)
    echo_json(facts, as_json)
