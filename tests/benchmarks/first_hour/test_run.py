"""Whatever happens to a step becomes a result, and the report is whole at every moment."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.first_hour import run
from benchmarks.first_hour.catalogue import STEPS, Step, chosen_steps
from benchmarks.first_hour.report import pack
from benchmarks.first_hour.results import Report, StepResult, load_report
from benchmarks.first_hour.run import first_hour
from runtimes.base.errors import UserError
from runtimes.base.lock import only_writer

Toy = Callable[..., Step]
ENDS = {
    "right": ("passed", "1 checks passed"),
    "wrong": ("failed", "another: differs by 3 nats"),
    "raises_in_part": ("failed", "illegal memory access"),
    "killed": ("crashed", "killed by SIGKILL, as the system does when memory runs out"),
    "broken": ("crashed", "killed by SIGSEGV"),
    "silent": ("crashed", "ended without a result, exit code 0"),
    "full": ("out of memory", "Tried to allocate"),
    "missing": ("missing", "a_package_that_nobody_has"),
    "elsewhere": ("not run", "it needs two GPUs"),
    "hangs": ("out of time", "stopped after 0.04 minutes"),
}


def test_every_end_of_a_step_is_a_result_and_stops_no_other(toy: Toy, machine: Step, tmp_path: Path) -> None:
    steps = [machine, toy("right", options={"word": "all"}), *(toy(name) for name in list(ENDS)[1:-1])]
    steps += [toy("hangs", minutes=0.04), toy("right", name="on a GPU", gpu=True, options={"word": "never"})]
    lines: list[str] = []
    report = first_hour(tmp_path / "report", steps, limit_minutes=10, say=lines.append)
    for name, (status, words) in ENDS.items():
        result = report.step(name)
        assert result is not None
        assert result.status == status, result
        assert words in result.sentence, result
    on_gpu, killed = report.step("on a GPU"), report.step("killed")
    assert on_gpu is not None
    assert on_gpu.status == "not run"
    assert killed is not None
    assert [check.sentence for check in killed.checks] == ["kept"]
    with pytest.raises(ProcessLookupError):  # no step leaves processes behind
        os.kill(int(killed.facts["child"]), 0)
    broken = report.step("broken")
    assert broken is not None
    assert any("Segmentation fault" in line for line in broken.last_lines)
    assert any(
        "no NVIDIA GPU that can be used, because the driver is not installed" in line for line in lines
    )

    out = tmp_path / "report"
    assert load_report(out / "report.json").finished
    assert sorted(path.name for path in out.iterdir()) == [
        "index.html",
        "logs",
        "report.json",
        "report.md",
        "report.tar.gz",
    ]
    assert "**Not run**, because it needs two GPUs: `elsewhere`." in (out / "report.md").read_text()
    page, html = (out / "report.md").read_text(), (out / "index.html").read_text()
    for status, words in ENDS.values():
        assert status in page
        assert words in page
        assert words in html
    with tarfile.open(out / "report.tar.gz") as archive:
        members = {member.name: member for member in archive.getmembers()}
        assert "first-hour/logs/hangs.txt" in members
        assert {(member.uname, member.gname, member.uid) for member in members.values()} == {("", "", 0)}
        packed = archive.extractfile("first-hour/report.json")
        assert packed is not None
        assert json.loads(packed.read()) == json.loads((out / "report.json").read_text())


def test_an_interrupted_report_is_whole_and_goes_on(
    toy: Toy, machine: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_step(step: Step, work: Path, *, seconds: float, quick: bool) -> StepResult:
        ran.append(step.name)
        if step.name == "second" and ran.count("second") == 1:
            raise KeyboardInterrupt
        return StepResult(name=step.name, title=step.title, status="failed")

    monkeypatch.setattr(run, "run_step", run_step)
    out, steps = tmp_path / "report", [machine, toy("right", name="first"), toy("right", name="second")]
    with pytest.raises(KeyboardInterrupt):
        first_hour(out, steps, limit_minutes=10)
    partial = load_report(out / "report.json")
    assert [step.status for step in partial.steps] == ["failed", "failed", "interrupted"]
    assert not partial.finished
    assert "`--resume` goes on with it" in (out / "report.md").read_text()
    assert (out / "report.tar.gz").is_file()

    with pytest.raises(UserError, match="--resume to go on with it"):
        first_hour(out, steps, limit_minutes=10)
    with pytest.raises(UserError, match="begun without --quick"):
        first_hour(out, steps, limit_minutes=10, quick=True, resume=True)
    report = first_hour(out, steps, limit_minutes=10, resume=True)
    assert ran == ["machine", "first", "second", "machine", "second"]  # the first step is done, and kept
    assert [step.status for step in report.steps] == ["failed"] * 3
    assert report.finished
    again = first_hour(out, steps[:1], limit_minutes=10, force=True)
    assert len(again.steps) == 1


def test_without_time_left_a_step_is_not_run(toy: Toy, machine: Step, tmp_path: Path) -> None:
    report = first_hour(tmp_path / "report", [machine, toy("right")], limit_minutes=0.3)
    left = report.step("right")
    assert left is not None
    assert left.status == "not run"
    assert "--limit-minutes" in left.sentence


def test_a_folder_of_something_else_is_never_replaced(toy: Toy, machine: Step, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(UserError):
            first_hour(tmp_path, [machine], limit_minutes=1, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_report_that_is_being_written_is_left_alone_and_only_a_report_is_replaced(
    toy: Toy, machine: Step, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "report.json").write_text("the report of another process")
    with (
        only_writer(tmp_path, doing="a report"),
        pytest.raises(UserError, match="written by another process"),
    ):
        first_hour(tmp_path, [machine], limit_minutes=1, force=True)
    assert (tmp_path / "report.json").read_text() == "the report of another process"
    first_hour(tmp_path, [machine], limit_minutes=1, force=True)
    assert load_report(tmp_path / "report.json").finished
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_report_that_goes_on_knows_the_rates_that_were_measured(
    toy: Toy, machine: Step, tmp_path: Path
) -> None:
    limits, rated = toy("measures", name="limits"), toy("rated")
    first_hour(tmp_path / "report", [machine, limits], limit_minutes=1)
    report = first_hour(tmp_path / "report", [machine, limits, rated], limit_minutes=1, resume=True)
    result = report.step("rated")
    assert result is not None
    assert result.facts == {"rate": "2000000000000.0"}


def test_an_altered_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"schema": 1, "begun": "now"}))
    with pytest.raises(UserError, match="unknown key 'begun'"):
        load_report(tmp_path / "report.json")


def test_names_of_steps() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert [step.name for step in chosen_steps("limits, tests")] == ["machine", "limits", "tests"]
    assert len(chosen_steps("engine-small-*")) == 20
    assert chosen_steps(None) == STEPS
    with pytest.raises(UserError, match="'engin', which is no step"):
        chosen_steps("engin")


def test_every_step_names_a_function_with_these_options() -> None:
    import importlib
    import inspect

    for step in STEPS:
        module, _, function = step.target.partition(":")
        found = getattr(importlib.import_module(module), function)
        inspect.signature(found).bind(None, **step.options)


def test_two_archives_of_one_report_are_the_same_bytes(tmp_path: Path) -> None:
    from benchmarks.first_hour.private import Scrubber
    from benchmarks.first_hour.report import save_report

    save_report(tmp_path, Report(began="now", versions={}), scrub=Scrubber(words={}, parts={}))
    assert pack(tmp_path).read_bytes() == pack(tmp_path).read_bytes()
