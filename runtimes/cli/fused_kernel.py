"""`xl-export fused-kernel`: builds the fused attention operator for this processor."""

from __future__ import annotations

import click

from runtimes.sessions import fused_cpu


@click.command("fused-kernel")
def fused_kernel_command() -> None:
    """Build the fused attention operator for this processor.

    That takes GCC (g++, or what $CXX names). Built once, it is used by every command, for every artefact that has a graph
    for it; `info` says which have. Its file is in the user's cache; without it the standard operators compute the same.
    """
    there = fused_cpu.built() is not None
    click.echo(f"the fused kernel {'was there already' if there else 'is built'}: {fused_cpu.build()}")
