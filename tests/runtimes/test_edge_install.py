"""A device without PyTorch: the package installed into an empty environment, as an edge user does it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.source_tree import copy_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip installs into a new environment
ROOT = Path(__file__).parents[2]
EDGE_PACKAGES = {"click", "flatbuffers", "numpy", "onnxruntime", "packaging", "protobuf", "xl-export"}
# Packages that some releases of ONNX Runtime need in addition.
EXTRA = {
    "coloredlogs",
    "humanfriendly",
    "sympy",
    "mpmath",
    "ml-dtypes",
    "ml_dtypes",
    "typing-extensions",
    "typing_extensions",
}


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment in which `pip install '.[cpu]'` has run without a compiler."""
    base = tmp_path_factory.mktemp("edge")
    source = copy_source(base / "source")
    venv.create(base / "venv")  # the pip of this environment installs into it
    commands = base / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", commands / "python", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", f"{source}[cpu]"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=base,
        env={**os.environ, "CXX": "no-such-compiler"},
    )
    assert installed.returncode == 0, installed.stderr
    return commands


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(argument) for argument in arguments], capture_output=True, text=True, timeout=200, cwd="/"
    )


def test_the_edge_holds_only_what_it_needs(edge: Path) -> None:
    code = (
        "from importlib.metadata import distributions\n"
        "print(*{distribution.metadata['Name'].lower() for distribution in distributions()})"
    )
    found = set(call(edge / "python", "-c", code).stdout.split()) - {"pip", "setuptools", "wheel"}
    assert found >= {"click", "numpy", "onnxruntime", "xl-export"}
    assert found <= EDGE_PACKAGES | EXTRA
    for package in ("torch", "onnx", "onnx_ir", "safetensors", "tqdm"):
        assert "ModuleNotFoundError" in call(edge / "python", "-c", f"import {package}").stderr, package


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no ONNX Runtime for this Python runs the ring form")
def test_every_edge_command_works_there(
    edge: Path, artefacts: dict[str, Path], text: str, tmp_path: Path
) -> None:
    (tmp_path / "some.txt").write_text(text[:500], encoding="utf-8")
    options = {
        "check": (),
        "eval": ("--text", tmp_path / "some.txt"),
        "generate": ("--prompt", "The ", "--tokens", 5),
        "info": (),
    }
    for command, given in options.items():
        ended = call(edge / "xl-export", command, artefacts["ring"], *given)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        assert ended.stdout
    assert "computed by ONNX Runtime, standard operators" in ended.stdout
    assert "there is a graph for the fused operator, which `xl-export fused-kernel` builds" in ended.stdout


def test_commands_that_need_torch_name_what_to_install(edge: Path, run: Path, tmp_path: Path) -> None:
    cases: list[tuple[tuple[object, ...], str]] = [
        (("info", run), "pip install 'torch>=2.6' 'safetensors>=0.4' 'tqdm>=4.60'`"),
        (("generate", run, "--prompt", "a"), "pip install 'torch>=2.6'"),
        (("train", "--out", tmp_path / "run"), "pip install 'torch>=2.6'"),
        (
            ("export", run, "--out", tmp_path / "artefact"),
            "pip install 'onnx>=1.19' 'onnx-ir>=1.1' 'torch>",
        ),
        (("demo", "--train", "--out", tmp_path / "demo"), "'tokenizers>=0.20'`"),
    ]
    for arguments, advice in cases:
        ended = call(edge / "xl-export", *arguments)
        assert ended.returncode == 2, (arguments, ended.stderr)
        assert ended.stderr.startswith("Error: ")
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert advice in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_onnx_runtime_is_named_with_what_to_install(edge: Path, artefacts: dict[str, Path]) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from xl_export.cli.main import main; main()"
    for command in (("check",), ("generate", "--prompt", "a")):
        ended = call(edge / "python", "-c", code, command[0], artefacts["ring"], *command[1:])
        assert ended.returncode == 2
        assert ended.stderr.startswith("Error: ONNX Runtime is not installed")
        assert "pip install 'onnxruntime>=1." in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
    assert (
        call(edge / "python", "-c", code, "info", artefacts["ring"]).returncode == 0
    )  # the spec alone is enough
