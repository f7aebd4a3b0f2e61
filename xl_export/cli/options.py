"""Options that the commands of this folder share."""

from __future__ import annotations

from pathlib import Path

import click

# The packages that the steps of this folder import when they run.
PACKAGES = ("torch", "safetensors", "tqdm", "onnx", "onnx_ir", "onnxruntime")
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The folder to write, such as result."
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Replace the folder, and delete what is in it, if it holds an earlier result of the same kind.",
)
triton_option = click.option(
    "--triton",
    type=click.Path(path_type=Path),
    metavar="REPOSITORY",
    help="Also write a model for Triton Inference Server into this model repository. It is called like the "
    "folder of --out, and the server keeps the memory of each stream.",
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
