"""The bottom layer imports neither PyTorch nor the layers above it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


# There are no import cycles (tests/test_layers.py), so one process may import all modules.
ALL = """
import json, traceback
failed = {}
for module in sys.argv[1:]:
    try:
        __import__(module)
    except BaseException:
        failed[module] = traceback.format_exc()
print(json.dumps(failed))
"""


def test_each_module_imports_without_upper_layers_and_options(python: Callable) -> None:
    ended = python(ALL, *MODULES, "runtimes.none", block=(*ABOVE, "onnxruntime"))
    assert ended.returncode == 0, ended.stderr
    failed = json.loads(ended.stdout)
    assert list(failed) == ["runtimes.none"], failed
    assert {"runtimes.contract.session", "runtimes.sessions.onnx_runtime", "runtimes.cli.eval"} <= set(
        MODULES
    )


def test_names_that_are_imported_when_used_are_listed(python: Callable) -> None:
    listed = "import runtimes, xl_export; print(*({*x.__all__} - {*dir(x)} for x in (runtimes, xl_export)))"
    assert python(listed, block=("torch",)).stdout.split() == ["set()", "set()"]


EVERY_COMMAND = "from xl_export.cli.main import main; [*main.commands.values()]; print(*sys.modules)"


def test_the_command_line_imports_nothing_heavy(python: Callable) -> None:
    loaded = set(python(EVERY_COMMAND).stdout.split())
    assert "click" in loaded
    heavy = {"onnxruntime", *ABOVE} - {"trainer", "xl_export"}
    assert not loaded & heavy
    # Of the trainer only the configuration, which has the options of `train`.
    assert {name for name in loaded if name.startswith("trainer.")} == {
        "trainer.model",
        "trainer.model.config",
        "trainer.run",
        "trainer.run.choices",
        "trainer.run.config",
        "trainer.run.optimizer_config",
    }


GENERATE = """
from xl_export.cli.main import main
try:
    main(["generate", sys.argv[1], "--prompt", "a", "--tokens", "2", "--temperature", "0"])
finally:
    print(*sys.modules)
"""
NEEDLESS = {  # and take milliseconds each
    "numpy.ma",
    "numpy.random",
    "runtimes.sessions.ort_gpu.provider",
    "shutil",
    "tempfile",
    "trainer",
    "xl_export.cli.export",
    "zipfile",
}


def test_generating_imports_nothing_needless(python: Callable, artefacts: dict[str, Path]) -> None:
    loaded = set(python(GENERATE, artefacts["ring"]).stdout.split())
    assert "onnxruntime" in loaded
    assert not loaded & NEEDLESS
