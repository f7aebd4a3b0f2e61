"""Long work says how far it is, on standard error alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.base import progress
from runtimes.base.progress import Progress
from tests.clock import set_clock
from tests.commands import json_of, xl


def clock(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    set_clock(monkeypatch, progress, monotonic=lambda: next(seconds))


def test_lines_come_after_two_seconds_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, iter(range(1000)))
    say, said = Progress("scoring", 1000, "tokens"), []
    for second in range(1, 400):
        say(second)
        if (line := capsys.readouterr()).err:
            said.append(second)
            assert line.out == ""
            assert line.err == f"scoring: {second} of 1,000 tokens, {1000 - second} s left\n"
    assert said == [2, 4, 8, 16, 32, 64, 124, 184, 244, 304, 364]


def test_short_work_prints_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, iter([0, 1.9, 100]))
    say = Progress("scoring", 10, "tokens")
    say(9)
    say(10)
    assert capsys.readouterr() == ("", "")


def test_eval_reports_its_progress(
    artefacts: dict[str, Path],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text.txt").write_text(text[:201], encoding="utf-8")
    arguments = ("eval", artefacts["ring"], "--text", tmp_path / "text.txt", "--json")
    quiet = xl(*arguments)
    assert quiet.stderr == ""
    clock(monkeypatch, iter(range(1000)))
    slow = xl(*arguments)
    assert (
        slow.stderr.splitlines()[0] == "scoring with memory 16 in segments of 8: 16 of 200 tokens, 23 s left"
    )
    assert len(slow.stderr.splitlines()) == 4
    assert json_of(slow)["nats"] == json_of(quiet)["nats"]
    assert len(slow.stdout.splitlines()) == len(quiet.stdout.splitlines())
