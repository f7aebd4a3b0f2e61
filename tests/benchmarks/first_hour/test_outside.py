"""The steps in which other programs open an engine, with stand-ins for the GPU and for NVIDIA's tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.outside import rtx_cache, trtexec
from runtimes.contract.engine import Flavour
from tests.fake_gpu import FakeCuda

ROOT = Path(__file__).parents[3]
TOOL = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    --saveEngine=*) echo a plan > "${word#--saveEngine=}" ;;
    --loadEngine=*) test -s "${word#--loadEngine=}" || { echo "[E] there is no plan"; exit 1; } ;;
    --loadInputs=*) for file in $(echo "${word#--loadInputs=}" | tr , " "); do
      test -s "${file#*:}" || { echo "[E] there is no ${file#*:}"; exit 1; }; done ;;
  esac
done
echo "[I] GPU Compute Time: min = 0.1 ms, max = 0.3 ms, mean = 0.2 ms, median = 0.2 ms"
FAILS
"""


def put_on_the_path(tool: str, folder: Path, patch: pytest.MonkeyPatch, *, fails: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / tool).write_text(TOOL.replace("FAILS", fails))
    (folder / tool).chmod(0o700)
    patch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.parametrize(("flavour", "tool"), [("tensorrt", "trtexec"), ("rtx", "tensorrt_rtx")])
def test_the_lines_for_nvidias_tool_are_run(
    flavour: Flavour,
    tool: str,
    record: Record,
    gpu: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_on_the_path(tool, tmp_path / "bin", monkeypatch)
    trtexec.run(record, flavour=flavour)
    timed = [f"{tool} times the profile {name}" for name in ("segment", "token")]
    names = [f"{tool} builds", f"{tool} builds: the plan", *timed]
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in names]
    for name in timed:
        assert record.result.facts[name] == "min = 0.1 ms, max = 0.3 ms, mean = 0.2 ms, median = 0.2 ms"

    put_on_the_path(tool, tmp_path / "bin", monkeypatch, fails="echo '[E] unknown option'; exit 3")
    record.result = type(record.result)(name="again")
    trtexec.run(record, flavour=flavour)
    failed = [check.name for check in record.result.checks if not check.passed]
    assert failed == [f"{tool} builds", *timed]
    assert record.result.checks[0].sentence == "exit code 3: [E] unknown option"


def test_without_nvidias_tool_the_step_says_where_it_comes_from(
    record: Record, gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotHereError, match=r"^trtexec is not on the PATH; NVIDIA's archives and containers"):
        trtexec.run(record, flavour="tensorrt")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that a step starts have the stand-in too."""
    places = (Path(__file__).parent / "standin", ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))


def test_a_second_process_reads_what_the_first_has_compiled(
    record: Record, gpu: FakeCuda, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    really = rtx_cache.in_a_process

    def watched(engine: Path, cache: Path) -> dict[str, object]:
        found = really(engine, cache)
        sizes.extend(path.stat().st_size for path in cache.iterdir())
        return found

    monkeypatch.setattr(rtx_cache, "in_a_process", watched)
    rtx_cache.run(record)
    names = [f"the cache after {name}" for name in rtx_cache.PROCESSES] + ["the answers of both processes"]
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in names]
    assert sizes == [len(b" and more"), len(b" and more and more")]  # the stand-in adds to what it has read
    assert all(f"{name}: opened and answered" in record.result.facts for name in rtx_cache.PROCESSES)


def test_a_process_that_fails_and_answers_that_differ_are_found(
    record: Record, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((0.0, 0.5))
    monkeypatch.setattr(
        rtx_cache, "in_a_process", lambda *given: {"seconds": 1.0, "log_probs": [next(answers)]}
    )
    rtx_cache.run(record)
    assert [check.passed for check in record.result.checks] == [False] * 3  # no cache was written either
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(RuntimeError, match=r"^the process ended with exit code [12]: .*nowhere"):
        rtx_cache.in_a_process(Path("nowhere"), Path("nowhere"))
