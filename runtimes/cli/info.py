"""`xl-export info`: what an artefact, an engine or a run is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from runtimes.base.ranges import counted
from runtimes.cli.options import folder_argument, json_option, show
from runtimes.contract.saved_streams import describe_streams, holds_streams
from runtimes.sessions import fused_cpu
from runtimes.sessions.open import describe
from runtimes.tasks.describe import detail_lines, next_command, summary_lines


@click.command("info")
@folder_argument
@click.option("--all", "all_", is_flag=True, help="Add every fact of --json: hashes, training, tensors.")
@json_option
def info_command(path: Path, all_: bool, as_json: bool) -> None:
    """Print what is at PATH, and what to do with it.

    PATH is an artefact, an engine, a run, or a file of saved streams. The summary has the kind of model, its
    vocabulary, the memory of a stream, the precision and the sampling defaults. --json always has every
    detail.
    """
    if holds_streams(path):
        facts = describe_streams(path)
        lines = _streams(facts, path)
    else:
        facts = describe(path)
        if facts.get("fused_graph") and (sentence := fused_cpu.ignored()):
            facts["fused_kernel_ignored"] = sentence
        details = detail_lines(facts) if all_ else []
        lines = [*summary_lines(facts, path), *details, f"next        {next_command(facts, path)}"]
    show(facts, lines, as_json=as_json)


def _streams(facts: dict[str, Any], path: Path) -> list[str]:
    positions = facts["positions"]
    count = counted(len(positions), "saved stream")
    shown = ", ".join(f"{position:,}" for position in positions[:8]) + ", …" * (len(positions) > 8)
    file = shlex.quote(str(path))
    identity = facts["memory_identity"]
    adopted = [hash for row in facts["adopted"] for hash in row]
    return [
        f"{path} holds {count}, {facts['bytes'] / 1e6:,.2f} MB, after {shown} tokens",
        f"layout      {identity['layout']} (`xl-export info ARTEFACT --all` prints it and the weights)",
        f"weights     {identity['weights']}",
        *(f"adopted     from {hash}" for hash in dict.fromkeys(adopted)),
        f"written by  {facts['artefact']}",
        f'next        xl-export generate ARTEFACT --load-memory {file} --prompt " and"',
    ]
