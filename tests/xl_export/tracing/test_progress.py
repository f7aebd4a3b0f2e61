"""A trace that takes long names its stages, on a terminal and in a log."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from xl_export.tracing import progress


def shown_by(stream: io.StringIO, expected: Callable[[str], bool]) -> str:
    with progress.stage("tracing", advice="Fix the rows.") as begins:
        begins("a part")
        while not expected(stream.getvalue()):  # the test has a time limit
            time.sleep(0.01)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)


def test_a_log_has_a_line_for_a_long_stage_and_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ADVICE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    text = shown_by(stream, lambda text: text.count("\n") == 2)
    assert text == "trace, stage 2 of 3: tracing …\nFix the rows.\n"


def test_a_terminal_counts_the_seconds_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    text = shown_by(stream, lambda text: text.count("tracing: a part (00:0") > 1)
    assert "\n" not in text
    assert text.rsplit("\r", 2)[-2].strip() == ""  # the line is gone
