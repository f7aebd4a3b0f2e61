"""The bottom layer imports neither PyTorch nor the layers above it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import runtimes

ROOT = Path(runtimes.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)
ABOVE = (
    "torch",
    "onnx",
    "onnx_ir",
    "safetensors",
    "tqdm",
    "tensorrt",
    "tensorrt_rtx",
    "cuda",
    "matplotlib",
    "trainer",
    "xl_export",
    "benchmarks",
)


def test_there_are_modules_to_import() -> None:
    assert {
        "runtimes.contract.session",
        "runtimes.sessions.onnx_runtime",
        "runtimes.cli.eval",
    } <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone_without_what_lies_above_or_is_optional(
    module: str, python: Callable
) -> None:
    ended = python(f"import {module}", block=(*ABOVE, "onnxruntime"))
    assert ended.returncode == 0, ended.stderr


def test_the_command_line_imports_nothing_heavy(python: Callable) -> None:
    loaded = set(python("import xl_export.cli.main; print(*sys.modules)").stdout.split())
    assert "click" in loaded
    heavy = {"onnxruntime", *ABOVE} - {"trainer", "xl_export"}
    assert not loaded & heavy
    # Of the trainer only the names that options can have; they need nothing else.
    assert {name for name in loaded if name.startswith("trainer.")} == {"trainer.run", "trainer.run.choices"}
