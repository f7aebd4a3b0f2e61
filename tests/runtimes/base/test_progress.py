"""Long work says what it does and how far it is, on standard error alone."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.base import progress
from runtimes.base.progress import Progress, working
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


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    clock(monkeypatch, iter([0, 1, 3, 3.01, 6]))
    with Progress("scoring", 100, "tokens") as say:
        for done in (10, 30, 31, 60):
            say(done)
    *bars, last = stream.getvalue().removesuffix("\r").split("\r")
    assert bars == [
        f"scoring: {'█' * 9}{'·' * 21} 30 of 100 tokens, 7 s left",
        f"scoring: {'█' * 18}{'·' * 12} 60 of 100 tokens, 4 s left",
    ]
    assert last == " " * len(bars[-1])


def test_a_bar_is_shorter_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("COLUMNS", "50")
    clock(monkeypatch, iter([0, 3]))
    with Progress("scoring", 100, "tokens") as say:
        say(30)
    bar = stream.getvalue().split("\r")[0]
    assert bar == f"scoring: {'█' * 3}{'·' * 10} 30 of 100 tokens, 7 s left"


def shown_by(stream: io.StringIO, expected: Callable[[str], bool]) -> str:
    with working("tracing", advice="Fix the rows.") as begins:
        begins("a part")
        while not expected(stream.getvalue()):  # the test has a time limit
            time.sleep(0.01)
    return stream.getvalue()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)


@pytest.mark.usefixtures("impatient")
def test_a_log_has_a_line_for_long_work_and_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ADVICE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    assert shown_by(stream, lambda text: text.count("\n") == 2) == "tracing …\nFix the rows.\n"


@pytest.mark.usefixtures("impatient")
def test_a_terminal_counts_the_seconds_of_the_newest_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with working("exporting"):
        text = shown_by(stream, lambda text: text.count("tracing: a part (0 s)") > 2)
    assert "\n" not in text
    first, rest = text.split("tracing", 1)
    assert "exporting (0 s)" in first
    assert "exporting" not in rest
    assert text.rsplit("\r", 2)[-2].strip() == ""  # the line is gone
