"""How a command starts: usage errors, shadowed packages, and the environment of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES
from tests.commands import refused, xl

ROOT = Path(__file__).parents[3]
# The first import of a package tells what the environment was then.
RECORD = """
import os, sys
from importlib.abc import MetaPathFinder
class Recorder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "onnxruntime"):
            print(name, os.environ.get("OMP_WAIT_POLICY"), os.environ.get("ORT_DISABLE_TELEMETRY"),
            file=sys.stderr)
sys.meta_path.insert(0, Recorder())
from xl_export.cli.main import main
main(prog_name="xl-export")
"""


def python(*arguments: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with no variable of the environment that these tests are about."""
    unset = ("OMP_WAIT_POLICY", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "CI", "GITHUB_ACTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("expotr", "run"), ("no command 'expotr'", "export was probably meant", "`xl-export --help`")),
        (("zzz",), ("no command 'zzz'", "`xl-export --help`")),
        (("eval", "x", "--tetx", "y"), ("xl-export eval has no option --tetx", "--text was probably meant")),
        (("--vresion",), ("no option --vresion", "--version was probably meant")),
        (("eval", "x"), ("missing option '--text'", "`xl-export eval --help`")),
        (("check",), ("missing argument 'PATH'", "`xl-export check --help`")),
        (("check", "x", "--threads", 0), ("invalid value for '--threads'", "1<=x<=1024")),
        (("check", "x", "y"), ("unexpected extra argument (y)",)),
    ],
    ids=str,
)
def test_a_usage_error_is_one_sentence(arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    refused(xl(*arguments), *words)


def test_a_command_of_version_0_1_is_not_suggested() -> None:
    result = xl("onn")
    refused(result, "no command 'onn'")
    assert "onnx" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (("eval", "RUN", "--text", "text.txt"), "torch"),
        (("generate", "RUN", "--prompt", "a", "--tokens", 2), "torch"),
        (("attention", "RUN", "--text", "text.txt", "--out", "attention.png"), "torch"),
        (("export", "RUN", "--out", "artefact"), "torch onnxruntime"),
        (("check", "ARTEFACT"), "onnxruntime"),
    ],
    ids=str,
)
def test_the_environment_is_set_before_pytorch_and_onnx_runtime_load(
    arguments: tuple[object, ...],
    loaded: str,
    run: Path,
    artefacts: dict[str, Path],
    text: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(text[:300], encoding="utf-8")
    folders = {"RUN": run, "ARTEFACT": artefacts["ring"]}
    ended = python("-c", RECORD, *(folders.get(str(name), name) for name in arguments), folder=tmp_path)
    lines = [line.split() for line in ended.stderr.splitlines()]
    recorded = {line[0]: line[1:] for line in reversed(lines) if line[0] in ("torch", "onnxruntime")}
    assert set(loaded.split()) <= set(recorded), ended.stderr
    assert all(variables == ["PASSIVE", "1"] for variables in recorded.values()), recorded


def test_what_the_user_has_set_stays(artefacts: dict[str, Path], tmp_path: Path) -> None:
    choice = {"OMP_WAIT_POLICY": "ACTIVE", "ORT_DISABLE_TELEMETRY": "true"}
    ended = python("-c", RECORD, "check", artefacts["ring"], folder=tmp_path, **choice)
    assert ended.stderr.split() == ["onnxruntime", "ACTIVE", "true"]


SLOW = pytest.mark.slow
QUIET = [  # every command and function of ours that loads ONNX Runtime or PyTorch
    ("-m", "xl_export", "check", "ARTEFACT"),
    ("-m", "xl_export", "eval", "ARTEFACT", "--text", "text.txt"),
    ("-m", "xl_export", "generate", "ARTEFACT", "--prompt", "a", "--tokens", 2),
    ("-m", "xl_export", "info", "ARTEFACT"),
    ("-m", "xl_export", "recl", "RUN", "--text", "text.txt", "--lengths", "4:8:4", "--positions", 5),
    ("-m", "xl_export", "export", "RUN", "--out", "artefact", "--precision", "int8"),
    ("-m", "xl_export", "eval", "RUN", "--text", "text.txt"),
    ("-m", "xl_export", "import", "RUN", "--out", "imported"),
    ("-m", "xl_export", "train", "tiny", "--out", "trained", "--text", "long.txt", "--steps", 1),
    ("-m", "xl_export", "attention", "RUN", "--text", "text.txt", "--out", "attention.png"),
    ("-m", "xl_export", "spans", "SPANS", "--out", "spans.png"),
    ("-c", "import sys, runtimes; runtimes.open_session(sys.argv[1])", "ARTEFACT"),
    ("-c", "import benchmarks.checked_sessions"),
    pytest.param(
        (
            "-m",
            "xl_export",
            "build",
            "ARTEFACT",
            "--out",
            "engine",
            "--flavour",
            "rtx",
            "--compute-capability",
            "8.6",
        ),
        marks=SLOW,
    ),
]
# Matplotlib keeps a list of the fonts of the machine, which these commands need to draw.
DRAWING = ("attention", "spans")
MATPLOTLIB = {"cache/matplotlib", ".config", ".config/matplotlib"}


@pytest.mark.parametrize("arguments", QUIET, ids=str)
def test_nothing_is_written_to_the_users_cache(
    arguments: tuple[object, ...],
    run: Path,
    make_run: Callable[..., Path],
    artefacts: dict[str, Path],
    text: str,
    tmp_path: Path,
) -> None:
    """No library reports to its maker: the wheels of ONNX Runtime would write an identifier and events."""
    if "build" in arguments:
        pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux on x86-64)")
    home, work = tmp_path / "home", tmp_path / "work"
    (home / "cache").mkdir(parents=True)
    work.mkdir()
    (work / "text.txt").write_text(text[:300], encoding="utf-8")
    (work / "long.txt").write_text(text[:40_000], encoding="utf-8")
    folders = {"RUN": run, "ARTEFACT": artefacts["shift"]}
    if "SPANS" in arguments:
        folders["SPANS"] = make_run(**ARCHITECTURES["adaptive-span-masked"])
    where = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    ended = python(*(folders.get(str(name), name) for name in arguments), folder=work, **where)
    assert ended.returncode == 0, ended.stderr
    allowed = {"cache"} | (MATPLOTLIB if set(DRAWING) & set(arguments) else set())
    written = {path.relative_to(home).as_posix() for path in home.rglob("*")}
    assert {name for name in written if not name.startswith("cache/matplotlib/fontlist")} <= allowed


@pytest.mark.parametrize(
    ("name", "package"),
    [("trainer.py", "trainer"), ("runtimes/__init__.py", "runtimes"), ("benchmarks.py", "benchmarks")],
)
def test_a_file_that_shadows_a_package_is_named(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemError('this is the file of the user')")
    shadow = tmp_path / name.partition("/")[0]
    for arguments in (("-m", "xl_export", "--help"), ("-m", "benchmarks", "list")):
        if arguments[1] == package:  # then Python runs the user's file, and nothing of ours
            continue
        ended = python(*arguments, folder=tmp_path)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith(f"Error: {shadow} has the name of xl-export's package {package}")
        assert len(ended.stderr.splitlines()) == 1
    ended = python("-c", "import xl_export; xl_export.export", folder=tmp_path)
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {shadow} has the name of")


def test_a_script_beside_a_file_called_trainer_opens_no_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("")
    (tmp_path / "script.py").write_text(f"import runtimes\nruntimes.open_session({str(run)!r})\n")
    ended = python("script.py", folder=tmp_path)
    assert "rename a file or folder of the name trainer" in ended.stderr.splitlines()[-1]


def test_the_command_line_works_where_nothing_is_shadowed(tmp_path: Path) -> None:
    (
        tmp_path / "runtimes"
    ).mkdir()  # a folder without Python files hides no package that is installed or on the path
    assert python("-m", "xl_export", "--version", folder=tmp_path).returncode == 0
