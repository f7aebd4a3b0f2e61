"""`xl-export`: each step from text to a verified artefact is one command.

A command is imported when it is used, and heavy packages only by the commands that need them.
"""

from __future__ import annotations

import click

from runtimes.cli.group import Group

SECTIONS = {
    "Start": {
        "demo": "xl_export.cli.demo:demo_command",
        "train": "xl_export.cli.train:train_command",
        "import": "xl_export.cli.import_:import_command",
        "export": "xl_export.cli.export:export_command",
        "check": "runtimes.cli.check:check_command",
    },
    "Use": {
        "generate": "runtimes.cli.generate:generate_command",
        "eval": "xl_export.cli.on_ray:eval_command",
        "score": "xl_export.cli.on_ray:score_command",
        "serve": "xl_export.cli.serve:serve_command",
        "web": "xl_export.cli.web:web_command",
        "set": "runtimes.cli.set:set_command",
    },
    "Inspect": {
        "info": "runtimes.cli.info:info_command",
        "runs": "xl_export.cli.runs:runs_command",
        "attention": "xl_export.cli.attention:attention_command",
        "recl": "xl_export.cli.recl:recl_command",
        "spans": "xl_export.cli.attention:spans_command",
        "devices": "xl_export.cli.devices:devices_command",
    },
    "Data": {"prepare": "xl_export.cli.prepare:prepare_command"},
    "NVIDIA": {
        "build": "xl_export.cli.build:build_command",
        "refit": "xl_export.cli.deployment:refit_command",
        "polygraphy": "xl_export.cli.deployment:polygraphy_command",
    },
    "Build": {"fused-kernel": "runtimes.cli.fused_kernel:fused_kernel_command"},
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
