"""Measures what this project claims: `python -m benchmarks`."""

from xl_export.shadow import refuse_shadowed

refuse_shadowed()

from runtimes.base.startup import prepare_training  # noqa: E402 (it may be shadowed)

prepare_training()  # the cases import PyTorch and ONNX Runtime, and their children take over the environment
