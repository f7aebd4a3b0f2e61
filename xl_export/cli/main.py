"""`xl-export`: every step from text to a verified artefact as one command. Heavy packages load only in their command."""

from __future__ import annotations

import copy

import click

from runtimes.cli.check import check_command
from runtimes.cli.eval import eval_command
from runtimes.cli.fused_kernel import fused_kernel_command
from runtimes.cli.generate import generate_command
from runtimes.cli.group import Group
from runtimes.cli.info import info_command
from xl_export.cli.attention import attention_command, spans_command
from xl_export.cli.build import build_command
from xl_export.cli.demo import demo_command
from xl_export.cli.export import export_command
from xl_export.cli.import_ import import_command
from xl_export.cli.prepare import prepare_command
from xl_export.cli.recl import recl_command
from xl_export.cli.train import train_command


def hidden_alias(command: click.Command) -> click.Command:
    """The same command, left out of the list of commands."""
    alias = copy.copy(command)
    alias.hidden = True
    return alias


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="xl-export")
def main() -> None:
    """Take a language model with segment recurrence from text to a device that has no PyTorch.

    \b
    xl-export prepare text8 --from zip --out text8  public corpus → dataset; any text will do without
    xl-export train --out run                    text → run
    xl-export import model.pt --out run          checkpoint of another project → run
    xl-export export run --out artefact            run → artefact: ONNX graph, weights, proof
    xl-export check artefact                     the same numbers as PyTorch, on this device?
    xl-export build artefact --out engine     artefact → TensorRT engine, for NVIDIA GPUs
    xl-export eval artefact --text run/test.txt  bits per token, with memory
    xl-export generate artefact --prompt "The "  text, at the same cost for every token
    """


for command in (
    train_command,
    prepare_command, import_command, export_command, build_command, demo_command,
    check_command, eval_command, generate_command, info_command, recl_command, attention_command,
    spans_command, fused_kernel_command,
):  # fmt: skip
    main.add_command(command)
# The names of version 0.1, kept so that scripts and habits still work; the help shows the new ones alone.
for old, command in (
    ("data", prepare_command),
    ("onnx", export_command),
    ("tensorrt", build_command),
    ("kernel", fused_kernel_command),
):
    main.add_command(hidden_alias(command), old)
