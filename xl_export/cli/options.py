"""Options that the commands of this folder share."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError

# The packages that the steps of this folder import when they run.
PACKAGES = ("torch", "safetensors", "tqdm", "onnx", "onnx_ir", "onnxruntime")
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The folder to write, such as result."
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Replace the folder if it holds an earlier result of the same kind and nothing else.",
)
triton_option = click.option(
    "--triton",
    type=click.Path(path_type=Path),
    metavar="REPOSITORY",
    help="Also write a model for Triton Inference Server into this model repository, under the name of the "
    "folder of --out. The server keeps the memory of each stream.",
)
triton_backend_option = click.option(
    "--triton-backend",
    type=click.Choice(("onnxruntime", "python")),
    default="onnxruntime",
    show_default=True,
    help="What runs the model of --triton. onnxruntime is the server's own backend, which copies memory at "
    "each step. python runs a session of this project in the server, which writes the memory in place; the "
    "server's Python then needs NumPy, ONNX Runtime, click and this package.",
)


def extended(
    command: click.Command, options: Sequence[click.Parameter], run: Callable[..., None], note: str
) -> click.Command:
    """A copy of a command of the edge with further options; if the first is given, `run` gets all of them.

    note: the last paragraph of its help.
    """
    edge = command.callback
    assert edge is not None
    switch = options[0]
    assert switch.name is not None

    def chosen(**values: Any) -> None:
        if values[switch.name]:
            run(**values)
            return
        own = {param.name for param in command.params}
        if given := [name for name, value in values.items() if name not in own and value]:
            raise UserError(f"--{given[0]} is for {switch.opts[0]}; leave it out, or give both.")
        edge(**{name: value for name, value in values.items() if name in own})

    wrapped = copy.copy(command)
    wrapped.params = [*command.params, *options]
    wrapped.callback = chosen
    # The text keeps the indent of its source, which click removes only if every line has it.
    wrapped.help = f"{inspect.cleandoc(command.help or '')}\n\n{note}"
    return wrapped
