"""`xl-export`: each step from text to a verified artefact is one command.

Heavy packages are imported only by the commands that need them.
"""

from __future__ import annotations

import click

from runtimes.cli.check import check_command
from runtimes.cli.fused_kernel import fused_kernel_command
from runtimes.cli.generate import generate_command
from runtimes.cli.group import Group
from runtimes.cli.info import info_command
from runtimes.cli.set import set_command
from xl_export.cli.attention import attention_command, spans_command
from xl_export.cli.build import build_command
from xl_export.cli.demo import demo_command
from xl_export.cli.deployment import polygraphy_command, refit_command
from xl_export.cli.devices import devices_command
from xl_export.cli.export import export_command
from xl_export.cli.import_ import import_command
from xl_export.cli.on_ray import eval_command, score_command
from xl_export.cli.prepare import prepare_command
from xl_export.cli.recl import recl_command
from xl_export.cli.runs import runs_command
from xl_export.cli.serve import serve_command
from xl_export.cli.train import train_command
from xl_export.cli.web import web_command

SECTIONS = {
    "Start": [demo_command, train_command, import_command, export_command, check_command],
    "Use": [generate_command, eval_command, score_command, serve_command, web_command, set_command],
    "Inspect": [
        info_command,
        runs_command,
        attention_command,
        recl_command,
        spans_command,
        devices_command,
    ],
    "Data": [prepare_command],
    "NVIDIA": [build_command, refit_command, polygraphy_command],
    "Build": [fused_kernel_command],
}


@click.group(
    "xl-export",
    cls=Group,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="xl-export")
def main() -> None:
    """Sequence models whose memory and cost per token stay constant: train, export, check, run.

    A run is the folder of a trained model. An artefact is an exported run: an ONNX graph, its weights, and
    answers of PyTorch to compare with. An engine is an artefact built by TensorRT for NVIDIA GPUs.

    \b
    xl-export demo                                see what a trained model does
    xl-export train --text my.txt --out run       text → run
    xl-export export run --out artefact           run → artefact
    xl-export check artefact                      does this device compute what PyTorch computed?
    xl-export generate artefact --prompt "The"    artefact → text
    """
