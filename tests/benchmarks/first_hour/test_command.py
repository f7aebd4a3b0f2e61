"""The command line: one sentence for what cannot be, and a whole report when it is interrupted."""

from __future__ import annotations

import fnmatch
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.first_hour.catalogue import STEPS
from benchmarks.first_hour.results import load_report

ROOT = Path(__file__).parents[3]
BAD = [
    ([], "--out is not given"),
    (["--steps", "engine"], "'engine', which is no step"),
    (["--out", "OUT", "--limit-minutes", "0"], "--limit-minutes is 0"),
    (["--out", "OUT", "--resume", "--force"], "give one of the two"),
    (["--out", "OUT", "--resume"], "has no report.json to go on with"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_what_cannot_be_is_one_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    words = [str(tmp_path / "report") if word == "OUT" else word for word in options]
    result = CliRunner().invoke(main, ["first-hour", *words])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_every_step_and_runs_nothing() -> None:
    result = CliRunner().invoke(main, ["first-hour", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [step.name for step in STEPS]


def test_the_guide_names_every_step_and_no_other() -> None:
    guide = (ROOT / "docs" / "guides" / "first-hour.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    patterns = [name.replace("…", "*") for row in rows for name in re.findall(r"`([a-z0-9…-]+)`", row)]
    names = [step.name for step in STEPS]
    unnamed = [name for name in names if not any(fnmatch.fnmatchcase(name, each) for each in patterns)]
    assert unnamed == []
    of_steps = patterns[: patterns.index("nccl") + 1]  # the tables after it are of options and files
    assert [each for each in of_steps if not fnmatch.filter(names, each)] == []
    (left_out,) = (line for line in guide.splitlines() if line.startswith("**Not in the list:**"))
    assert "`mps`" in left_out
    assert not [word for word in ("trtexec", "cache of TensorRT-RTX") if word in left_out]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks at processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_a_report_to_go_on_with(how: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "report"
    words = [sys.executable, "-m", "benchmarks", "first-hour", "--quick", "--out", str(out)]
    words += ["--steps", "machine"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "machine: the machine" in process.stderr.readline()
    deadline = time.monotonic() + 280
    while not _children(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(how)
    code = process.wait(280)
    process.stderr.close()
    deadline = time.monotonic() + 280
    while _children(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _children(out) == [], "the process of the step is still there"
    report = load_report(out / "report.json")
    assert not report.finished
    if how == signal.SIGINT:
        assert code == 130
        assert [step.status for step in report.steps] == ["interrupted"]
        with tarfile.open(out / "report.tar.gz") as archive:
            assert "first-hour/report.md" in archive.getnames()
    again = subprocess.run([*words, "--resume"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    report = load_report(out / "report.json")
    assert report.finished
    assert [step.status for step in report.steps] == ["passed"]


def _children(out: Path) -> list[str]:
    """The processes of steps of this report."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if "benchmarks.first_hour.child" in words and any(str(out) in word for word in words):
            found.append(path.parent.name)
    return found


@pytest.mark.slow
def test_a_whole_report_with_a_stand_in_for_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "report"
    words = [sys.executable, "-m", "benchmarks", "first-hour", "--quick", "--out", str(out)]
    words += ["--steps", "limits,nccl,cuda-small-fp32,shapes-native,engine-small-tensorrt-native-ring-fp16"]
    path = os.pathsep.join((str(Path(__file__).parent / "standin"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {step.name: step for step in load_report(out / "report.json").steps}
    assert found["machine"].facts["GPU"] == "Fake RTX"
    for name in ("machine", "limits", "shapes-native"):
        assert found[name].status == "passed", found[name]
    engine = found["engine-small-tensorrt-native-ring-fp16"]
    assert engine.status in ("passed", "slower"), engine  # the stand-in is no GPU
    assert [(row.batch, row.tokens) for row in engine.rows] == [(1, 1), (1, 8), (8, 1), (8, 8)]
    assert all(row.limit_by == "reading" and row.limit_milliseconds for row in engine.rows)
    assert (found["nccl"].status, found["cuda-small-fp32"].status) == ("not run", "missing"), found
    page = (out / "report.md").read_text()
    assert "# The first hour on Fake RTX" in page
    assert "| small | 1 | 1 | TensorRT, native, ring, fp16 |" in page
