"""A package that is installed and cannot be loaded is not called missing, and the reason is quoted."""

from __future__ import annotations

import json
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
        ("torch", "dependency", "pip install -U 'torch>=2.6' 'safetensors"),
        ("tensorrt", "library", "'tensorrt>=10.15'"),
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

    hint = "'torch>=2.6'`, with `--extra-index-url https://download.pytorch.org/whl/cpu`"
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert "pytorch.org" not in sentence("demo", "onnx_ir")  # it is installed already
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hint in sentence("demo", "onnx_ir")  # the extra brings PyTorch
    assert "pytorch.org" not in sentence("cpu,serve", "onnx_ir")


# Packages that an installation for a device lacks, all of them at once.
ABSENT = [
    *("cryptography", "fsspec", "matplotlib", "onnx", "onnx_ir", "pyarrow", "ray"),
    *("sentencepiece", "starlette", "tensorrt", "tokenizers", "torch", "tqdm"),
]
TINY = ROOT / "tests" / "data" / "small"
NEEDS = (
    f"score {TINY} --input text.txt --ray local --out scores",
    f"eval {TINY} --text text.txt --ray local --work parts",
    f"check {TINY} --public-key text.txt",
    f"serve {TINY}",
    "train tiny --out run",
    "export . --out artefact",
    "import text.txt --describe",
    f"build {TINY} --out engine",
    f"recl {TINY} --text text.txt --lengths 4,8 --plot recl.png",
    "attention run --text text.txt --out pictures",
    "spans run",
    "prepare vocab --kind bpe --size 300 --text text.txt --out v.json",
    "demo --train",
    "demo",
)
MISSING = """
import json, shlex, sys
absent, commands = json.loads(sys.stdin.read())
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        return None if name.partition(".")[0] in absent else PathFinder.find_spec(name, *more)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from click.testing import CliRunner
from xl_export.cli.main import main
results = [CliRunner().invoke(main, shlex.split(command)) for command in commands]
print(json.dumps([[result.exit_code, result.stderr, repr(result.exception)] for result in results]))
"""


def test_a_missing_package_is_named_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The class of the class")
    ended = subprocess.run(
        [sys.executable, "-c", MISSING],
        input=json.dumps([ABSENT, NEEDS]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    for command, (code, said, error) in zip(NEEDS, found, strict=True):
        assert code == 2, (command, said, error)
        package, words, _ = said.removeprefix("Error: ").partition(" is not installed")
        assert words, (command, said)
        assert package in ABSENT, (command, said)
