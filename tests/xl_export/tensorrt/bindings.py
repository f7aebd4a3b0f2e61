"""The real TensorRT bindings without TensorRT: over stub libraries whose functions all return null.

Every class, enum and signature is there; `Builder` and `Runtime` cannot be made. Runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STUBS = {  # library: the functions that the bindings link to
    "nvinfer": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "nvonnxparser": ("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion"),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
}  # fmt: skip
ALIAS = "import sys, tensorrt_bindings\nsys.modules['tensorrt'] = trt = tensorrt_bindings\n"
MISSING = (
    "the TensorRT bindings are not installed (tensorrt-cu13-bindings, for Linux on x86-64)"
    if importlib.util.find_spec("tensorrt_bindings") is None
    else "gcc is not installed, which makes the stub libraries"
    if shutil.which("gcc") is None
    else ""
)
needs_bindings = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def make_stubs(folder: Path) -> Path:
    """The stub libraries, in a folder for LD_LIBRARY_PATH."""
    for name, functions in STUBS.items():
        source = folder / f"{name}.c"
        source.write_text("".join(f"void *{function}(void) {{ return 0; }}\n" for function in functions))
        library = folder / f"lib{name}.so.11"
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=60)
    return folder


def runner(stubs: Path) -> Callable[..., str]:
    """`run(code, *arguments)` → standard output of code in which `trt` is the module and `tensorrt` is importable."""

    def run(code: str, *arguments: object) -> str:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", ALIAS + code, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run
