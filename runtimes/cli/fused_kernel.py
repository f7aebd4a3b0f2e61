"""`xl-export fused-kernel`: builds the fused operator for this processor."""

from __future__ import annotations

import click

from runtimes.cli.options import json_option, show
from runtimes.sessions import fused_cpu


@click.command("fused-kernel")
@json_option
def fused_kernel_command(as_json: bool) -> None:
    """Build the fused operator for this processor.

    The fused operator is one C++ operator that computes a layer's attention faster than the standard
    operators of ONNX Runtime. It needs GCC 9 or newer: g++, or the compiler that the variable CXX names. It
    is built once on a machine, into the user's cache, and then every command uses it for each artefact that
    has a graph for it; `info` says whether an artefact has one. A wheel of this package brings libraries for
    common processors, which need no compiler; what is built here comes before them. Without any the standard
    operators compute the same.
    """
    if sentence := fused_cpu.ignored():
        click.echo(f"Warning: {sentence}", err=True)
    before = fused_cpu.compiled() is not None
    library = str(fused_cpu.build())
    line = f"the fused operator {'was built before' if before else 'is built'}: {library}"
    show({"library": library, "built_before": before}, [line], as_json=as_json)
