"""The real TensorRT bindings without TensorRT: over stub libraries whose functions all return null.

Every class, enum and signature is there; `Builder` and `Runtime` cannot be made. Runs in a process of its
own.

NVIDIA publishes the module `tensorrt` in two layouts. From PyPI it is a front package that re-exports the
public names of `tensorrt_bindings`; its files are written here as they are in `tensorrt_cu13` 11.4.0.106. On
JetPack, and in the archives, the bindings themselves are the package `tensorrt`.
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
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry",
        "getPluginRegistry",
    ),
    "nvonnxparser": (
        "createNvOnnxParserRefitter_INTERNAL",
        "createNvOnnxParser_INTERNAL",
        "getNvOnnxParserVersion",
    ),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
}
MAJORS = (10, 11)  # versions of TensorRT; `make test-bindings` has the oldest bindings that are allowed
LAYOUTS = {  # code that makes `trt` in each layout
    "front": "import sys\nimport tensorrt as trt\n",
    "single": "import sys, tensorrt_bindings\nsys.modules['tensorrt'] = trt = tensorrt_bindings\n",
}
FRONT = {  # files of the front package, without their licence headers
    "tensorrt/__init__.py": "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n",
    "tensorrt/plugin/__init__.py": "from tensorrt_bindings.plugin import *\n",
} | {
    f"tensorrt/plugin/_{name}.py": f"from tensorrt_bindings.plugin._{name} import *\n"
    for name in ("autotune", "export", "lib", "plugin_class", "tensor", "top_level", "utils", "validate")
}
MISSING = (
    "the TensorRT bindings are not installed (tensorrt-cu13-bindings, for Linux on x86-64)"
    if importlib.util.find_spec("tensorrt_bindings") is None
    else "gcc is not installed, which makes the stub libraries"
    if shutil.which("gcc") is None
    else ""
)
needs_bindings = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def make_stubs(folder: Path) -> Path:
    """The stub libraries, in a folder for LD_LIBRARY_PATH, and the front package in its subfolder `front`."""
    for name, text in FRONT.items():
        file = folder / "front" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name, functions in STUBS.items():
        source = folder / f"{name}.c"
        source.write_text("".join(f"void *{function}(void) {{ return 0; }}\n" for function in functions))
        for major in MAJORS:
            library = folder / f"lib{name}.so.{major}"
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source]
            subprocess.run(command, check=True, timeout=280)
    return folder


def runner(stubs: Path) -> Callable[..., str]:
    """`run(code, *arguments, layout=…)` → standard output of code in which `trt` is the module `tensorrt`."""

    def run(code: str, *arguments: object, layout: str = "front") -> str:
        folders = [str(stubs / "front"), *sys.path] if layout == "front" else sys.path
        environment = {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": os.pathsep.join(folders)}
        command = [sys.executable, "-c", LAYOUTS[layout] + code, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run
