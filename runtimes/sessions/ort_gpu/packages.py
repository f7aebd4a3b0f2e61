"""Which of ONNX Runtime's packages are installed.

A module of its own, because every session with the device `auto` asks for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from runtimes.base.errors import install

CUDA_PROVIDER = "CUDAExecutionProvider"  # ONNX Runtime's name


def both_installed() -> bool:
    """Whether `onnxruntime` and `onnxruntime-gpu` are installed: they overwrite each other's files."""
    ort = importlib.util.find_spec("onnxruntime")
    if ort is None or ort.origin is None:
        return False
    # What pip writes next to a package. `importlib.metadata` would read all packages' own, for 20 ms.
    records = Path(ort.origin).parents[1].glob("onnxruntime*.dist-info")
    return {"onnxruntime", "onnxruntime_gpu"} <= {record.name.partition("-")[0] for record in records}


def fault_of_both() -> str | None:
    """What is wrong if both packages of ONNX Runtime are installed, and how to fix it; None otherwise."""
    if not both_installed():
        return None
    return (
        "onnxruntime and onnxruntime-gpu are both installed, and each overwrites files of the other; run "
        f"{install_gpu()}"
    )


def install_gpu() -> str:
    """The commands that leave the package for GPUs only."""
    return f"`pip uninstall -y onnxruntime onnxruntime-gpu`, and then {install('gpu')}"
