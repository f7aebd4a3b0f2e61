"""`xl-export`: each step from text to a verified artefact is one command.

Heavy packages are imported only by the commands that need them.
"""

from __future__ import annotations

import click

from runtimes.cli.check import check_command
from runtimes.cli.devices import devices_command
from runtimes.cli.fused_kernel import fused_kernel_command
from runtimes.cli.generate import generate_command
from runtimes.cli.group import Group
from runtimes.cli.info import info_command
from runtimes.cli.set import set_command
from xl_export.cli.attention import attention_command, spans_command
from xl_export.cli.build import build_command
from xl_export.cli.demo import demo_command
from xl_export.cli.deployment import polygraphy_command, refit_command
from xl_export.cli.export import export_command
from xl_export.cli.import_ import import_command
from xl_export.cli.on_ray import eval_command, score_command
from xl_export.cli.prepare import prepare_command
from xl_export.cli.recl import recl_command
from xl_export.cli.runs import runs_command
from xl_export.cli.serve import serve_command
from xl_export.cli.train import train_command
from xl_export.cli.web import web_command

COMMANDS = [
    train_command,
    prepare_command,
    import_command,
    export_command,
    build_command,
    set_command,
    web_command,
    serve_command,
    demo_command,
    check_command,
    eval_command,
    score_command,
    generate_command,
    info_command,
    runs_command,
    recl_command,
    attention_command,
    spans_command,
    fused_kernel_command,
    devices_command,
    polygraphy_command,
    refit_command,
]


@click.group("xl-export", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="xl-export")
def main() -> None:
    """Take a language model with segment recurrence from text to a device without PyTorch.

    A run is the folder of a trained model. An artefact is the folder of an exported one: an ONNX graph, its
    weights, and answers of PyTorch to compare with. An engine is an artefact built by TensorRT for one kind
    of NVIDIA GPU.

    \b
    xl-export train --out run                         text → run
    xl-export import model.pt --out run               checkpoint of another project → run
    xl-export export run --out artefact               run → artefact
    xl-export build artefact --out engine             artefact → engine
    xl-export check artefact                          artefact → does this device compute the same as PyTorch?
    xl-export eval artefact --text run/test.txt       artefact → bits per token, with memory
    xl-export score artefact --input nbest.jsonl      artefact → log-probability of each text
    xl-export generate artefact --prompt "The "       artefact → text
    xl-export prepare text8 --from zip --out text8    public corpus → dataset for training
    """


for command in COMMANDS:
    main.add_command(command)
