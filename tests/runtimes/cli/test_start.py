"""How a command starts: usage errors, shadowed packages, and the environment of other libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.__main__ import main as benchmarks
from runtimes.base.errors import UserError
from runtimes.cli.group import _refusal
from runtimes.cli.options import Number
from tests.architectures import ARCHITECTURES
from xl_export.cli.main import main

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
import json
from pathlib import Path
from xl_export.cli.main import main
for arguments in json.loads(sys.argv[1]):  # one after the other, because PyTorch takes seconds to load
    try:
        main(arguments, prog_name="xl-export")
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
    there = sorted(path.relative_to(Path.home()).as_posix() for path in Path.home().rglob("*"))
    print("wrote", arguments[0], *there, file=sys.stderr)
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


def all_commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from all_commands(child)


def test_every_numeric_option_has_our_own_message() -> None:
    checked = dict.fromkeys((click.types.IntParamType, Number), 0)
    for command in (*all_commands(main), *all_commands(benchmarks)):
        for option in command.params:
            kind = option.type
            if isinstance(kind, click.types.FloatParamType):
                assert isinstance(kind, Number), option
            if (ours := next((each for each in checked if isinstance(kind, each)), None)) is None:
                continue
            least, most = getattr(kind, "min", None), getattr(kind, "max", None)
            outside = [bound + step for bound, step in ((least, -1), (most, 1)) if bound is not None]
            for given in ["many", *outside, *(("nan", "inf", "-inf", "1e400") if ours is Number else ())]:
                with pytest.raises((click.BadParameter, UserError)) as caught:
                    kind.convert(str(given), option, click.Context(command))
                refused = caught.value
                sentence = str(refused if isinstance(refused, UserError) else _refusal(refused))
                name = next(name for name in option.opts if name.startswith("--"))
                assert sentence.startswith(f"{name} is "), sentence
                assert re.search("; expected (a |1)", sentence)  # 1 of one CPU
                assert "<" not in sentence
                checked[ours] += 1
    assert all(checked.values())


# One process runs all calls of a row and loads PyTorch once: the environment is judged for the first call.
# Of the others, and of rows with "", the test says only that nothing is written.
QUIET = [  # every command and function of ours that loads ONNX Runtime or PyTorch, and which of them it loads
    ([["check", "ARTEFACT"], ["info", "ARTEFACT"]], "onnxruntime"),
    ([["eval", "RUN", "--text", "text.txt"], ["spans", "SPANS", "--out", "spans.png"]], "torch"),
    (["import sys, runtimes; runtimes.open_session(sys.argv[1])", "ARTEFACT"], ""),
    *(
        pytest.param(calls, loaded, marks=pytest.mark.slow)
        for calls, loaded in (
            ([["eval", "ARTEFACT", "--text", "text.txt"]], "onnxruntime"),
            ([["generate", "ARTEFACT", "--prompt", "a", "--tokens", "2"]], "onnxruntime"),
            ([["export", "RUN", "--out", "artefact", "--precision", "int8"]], "torch onnxruntime"),
            (
                [
                    ["recl", "RUN", "--text", "text.txt", "--lengths", "4:8:4", "--positions", "5"],
                    ["generate", "RUN", "--prompt", "a", "--tokens", "2"],
                    ["import", "RUN", "--out", "imported"],
                    ["train", "tiny", "--out", "trained", "--text", "long.txt", "--steps", "1"],
                    ["attention", "RUN", "--text", "text.txt", "--out", "attention.png"],
                ],
                "torch",
            ),
            (["import benchmarks.checked_sessions"], ""),
            (
                [["build", "ARTEFACT", "--out", "engine", "--flavour", "rtx", "--compute-capability", "8.6"]],
                "",
            ),
        )
    ),
]


@pytest.mark.parametrize(("calls", "loaded"), QUIET, ids=lambda given: str(given)[:60])
def test_no_library_reports_or_writes_to_the_cache(
    calls: list[Any],
    loaded: str,
    run: Path,
    make_run: Callable[..., Path],
    artefacts: dict[str, Path],
    text: str,
    tmp_path: Path,
) -> None:
    """No library reports to its maker: the wheels of ONNX Runtime would write an identifier and events."""
    if calls[0][0] == "build":
        pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux on x86-64)")
    home, work = tmp_path / "home", tmp_path / "work"
    (home / "cache").mkdir(parents=True)
    work.mkdir()
    (work / "text.txt").write_text(text[:300], encoding="utf-8")
    (work / "long.txt").write_text(text[:40_000], encoding="utf-8")
    folders = {"RUN": run, "ARTEFACT": artefacts["shift"]}
    if "SPANS" in calls[-1]:
        folders["SPANS"] = make_run(**ARCHITECTURES["adaptive-span-masked"])
    commands = isinstance(calls[0], list)
    filled = [[str(folders.get(word, word)) for word in call] for call in (calls if commands else [calls])]
    words = (RECORD, json.dumps(filled)) if commands else filled[0]
    where = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    ended = python("-c", *words, folder=work, **where)
    assert ended.returncode == 0, ended.stderr
    assert {path.relative_to(home).as_posix() for path in home.rglob("*")} == {"cache"}, ended.stderr
    lines = [line.split() for line in ended.stderr.splitlines()]
    assert [line[1:] for line in lines if line[:1] == ["wrote"]] == [
        [call[0], "cache"] for call in calls if commands
    ]
    recorded = {line[0]: line[1:] for line in reversed(lines) if line[:1] in (["torch"], ["onnxruntime"])}
    assert set(loaded.split()) <= set(recorded), ended.stderr
    assert all(variables == ["PASSIVE", "1"] for variables in recorded.values()), recorded


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


def test_opening_a_run_next_to_a_file_called_trainer_names_it(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    ended = python("-c", "import runtimes; runtimes.open_session('run')", folder=tmp_path)
    assert "rename a file or folder named trainer" in ended.stderr.splitlines()[-1]


IMPORTS = """
import xl_export
from xl_export.adapters import from_forward
for name in set(xl_export.__all__) - {"export"}:
    getattr(xl_export, name)
"""
TRACES = """
import torch

class Sums(torch.nn.Module):
    inputs = xl_export.features(2)

    def start(self, batch):
        return [torch.zeros(batch, 2)]

    def step(self, x, positions, memory):
        y = x.cumsum(1) + memory[0][:, None]
        return y, [y[:, -1]]

rule = xl_export.MemoryRule(mem_len=4, segment=4)
xl_export.trace(Sums(), "artefact", rule=rule, without={"padding"})
"""


@pytest.mark.parametrize(
    "script", [IMPORTS, pytest.param(IMPORTS + TRACES, marks=pytest.mark.slow)], ids=["imports", "traces"]
)
def test_a_script_next_to_a_file_called_trainer_traces_modules(script: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemError('this is the file of the user')")
    (tmp_path / "script.py").write_text(script)
    ended = python("script.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
