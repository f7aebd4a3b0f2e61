"""The bottom layer imports neither PyTorch nor the layers above it."""

from __future__ import annotations

import json
import sys
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


# A copy of the interpreter for each module: it has loaded the libraries that they need, and nothing of ours.
ALONE = """
import json, os, tempfile, traceback, warnings
import click, numpy
failed = {}
for module in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's threads may be there, and no child needs them
            child = os.fork()
        if not child:
            try:
                __import__(module)
            except BaseException:
                traceback.print_exc(file=said)
                said.flush()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            said.seek(0)
            failed[module] = said.read() or "the process ended"
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failed(python: Callable) -> dict[str, str]:
    """The modules that cannot be imported alone, with their errors."""
    ended = python(ALONE, *MODULES, "runtimes.none", block=(*ABOVE, "onnxruntime"))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone_without_what_lies_above_or_is_optional(
    module: str, failed: dict[str, str]
) -> None:
    assert module not in failed, failed[module]
    assert "No module named 'runtimes.none'" in failed["runtimes.none"]  # a failure is noticed


def test_the_command_line_imports_nothing_heavy(python: Callable) -> None:
    loaded = set(python("import xl_export.cli.main; print(*sys.modules)").stdout.split())
    assert "click" in loaded
    heavy = {"onnxruntime", *ABOVE} - {"trainer", "xl_export"}
    assert not loaded & heavy
    # Of the trainer only the names that options can have; they need nothing else.
    assert {name for name in loaded if name.startswith("trainer.")} == {"trainer.run", "trainer.run.choices"}


OPEN = """
import runtimes
from runtimes.base.errors import MissingPackageError
try:
    runtimes.open_session(sys.argv[1])
except MissingPackageError as error:
    print(error)
"""


def test_opening_an_artefact_without_onnx_runtime_says_what_to_install(
    artefacts: dict[str, Path], python: Callable
) -> None:
    ended = python(OPEN, artefacts["ring"], block=("onnxruntime",))
    assert ended.returncode == 0, ended.stderr
    assert "pip install '.[cpu]'" in ended.stdout
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.parametrize("missing", ["torch", "safetensors"])
def test_opening_a_run_without_its_packages_says_what_to_install(
    missing: str, run: Path, python: Callable
) -> None:
    ended = python(OPEN, run, block=(missing,))
    assert ended.returncode == 0, ended.stderr
    assert f"{missing} is not installed and this step needs it; run `pip install '.[train]'`" in ended.stdout
    assert ("whl/cpu" in ended.stdout) == (missing == "torch" and sys.platform == "linux")
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("version", "refused"), [("1.24.9", True), ("1.25.0", False), ("1.9.1", True), ("2.0.0", False)]
)
def test_an_onnx_runtime_too_old_for_the_ring_is_refused(
    version: str, refused: bool, artefacts: dict, python: Callable
) -> None:
    code = f"import onnxruntime\nonnxruntime.__version__ = {version!r}\n{OPEN}"
    said = python(code, artefacts["ring"]).stdout
    assert ("ring memory needs ONNX Runtime 1.25 or newer" in said) is refused
    assert ("--memory shift" in said) is refused
