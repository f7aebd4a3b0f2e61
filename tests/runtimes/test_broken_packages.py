"""A package that is installed and cannot be loaded is not called missing, and the reason is quoted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.base.errors import MissingPackageError, needs

ROOT = Path(__file__).parents[2]
GLIBCXX = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by pybind.so)"
BROKEN = {  # what the packages raise: the compiled part of one, a dependency, and a library that is missing
    "compiled": f'raise ImportError("{GLIBCXX}\\nsecond line", name="capi.pybind")',
    "dependency": "import a_dependency_that_is_missing",
    "library": 'import ctypes; ctypes.CDLL("libnowhere.so.9")',
}
REASONS = {
    "compiled": GLIBCXX,
    "dependency": "No module named 'a_dependency_that_is_missing'",
    "library": "libnowhere.so.9: cannot open shared object file",
}


def told(package: str, how: str, *arguments: object, folder: Path) -> str:
    """What a command says where `package` cannot be loaded."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(BROKEN[how])
    ended = subprocess.run(
        [sys.executable, "-m", "xl_export", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, lines
    assert f"installed and could not be loaded ({REASONS[how]}" in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("package", "how", "advice"),
    [
        ("onnxruntime", "compiled", "pip install -U onnxruntime"),
        ("torch", "dependency", "'.[train]'"),
        ("tensorrt", "library", "'.[tensorrt]'"),
    ],
)
def test_a_broken_package_is_named_with_the_reason(
    package: str, how: str, advice: str, run: Path, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    words: dict[str, tuple[object, ...]] = {
        "onnxruntime": ("check", artefacts["ring"]),
        "torch": ("eval", run, "--text", run / "config.json"),
        "tensorrt": ("build", artefacts["shift"], "--out", tmp_path / "out"),
    }
    sentence = told(package, how, *words[package], folder=tmp_path)
    assert sentence.lower().startswith(f"error: {package} is installed")
    assert advice in sentence


def test_errors_of_our_own_pass_through() -> None:
    with pytest.raises(ImportError, match="cannot import name"), needs("train", "torch"):
        from runtimes.base.errors import nothing_of_this_name  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(PermissionError), needs("train", "torch"):
        raise PermissionError(13, "Permission denied", "file")
    sentence = "no_such_package is not installed"
    with pytest.raises(MissingPackageError, match=sentence), needs("train", "no_such_package"):
        import no_such_package  # noqa: F401


def test_a_missing_pytorch_is_named_with_its_smaller_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")

    def sentence(extras: str, *packages: str) -> str:
        with pytest.raises(MissingPackageError) as caught, needs(extras, *packages):
            import onnx_ir  # noqa: F401
        return str(caught.value)

    hint = "'.[demo]'` in the checkout of xl-export, with `--extra-index-url https://download.pytorch.org/whl/cpu`"
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert "pytorch.org" not in sentence("demo", "onnx_ir")  # it is installed already
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hint in sentence("demo", "onnx_ir")  # the extra brings PyTorch
    assert "pytorch.org" not in sentence("cpu,serve", "onnx_ir")
