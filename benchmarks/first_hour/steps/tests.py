"""The project's own tests that need a GPU, run by pytest in a checkout."""

from __future__ import annotations

import _thread
import importlib.util
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.machine import checkout

PASSED = 0  # exit code of pytest
BEFORE_THE_END = 20.0  # seconds before the limit of the step, at which the tests are stopped
SENTENCE = 300  # characters
MARK = "mark.gpu"  # what the text of a file has whose tests need a GPU


class Reporter:
    """A plugin of pytest that keeps every failure at once, so that a crash keeps those before it."""

    def __init__(self, record: Record) -> None:
        self.record, self.counts, self.reasons = record, Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each of the three parts of a test."""
        if report.failed:
            self._keep(report)
        elif report.skipped:
            self.counts["skipped"] += 1
            self.reasons[str(report.longrepr[-1])[:SENTENCE]] += 1
        elif report.when == "call":
            self.counts["passed"] += 1
        else:
            return
        self.record.say(f"{self.said} of the tests that need a GPU")

    def pytest_collectreport(self, report: Any) -> None:
        """Called by pytest after it has imported a file."""
        if report.failed:
            self._keep(report)

    def _keep(self, report: Any) -> None:
        self.counts["failed"] += 1
        crash = getattr(report.longrepr, "reprcrash", None)
        # A file that cannot be imported has a text alone, and what is wrong stands at its end.
        said = crash.message[:SENTENCE] if crash else str(report.longrepr)[-SENTENCE:]
        self.record.check(report.nodeid, False, " ".join(said.split()))

    @property
    def said(self) -> str:
        return ", ".join(f"{self.counts[name]} {name}" for name in ("passed", "failed", "skipped"))

    def finish(self, code: int) -> None:
        """Keeps the outcome of all tests. code: the exit code of pytest."""
        for reason, count in self.reasons.items():
            self.record.fact(f"skipped: {reason}", count)
        right = code == PASSED and self.counts["passed"] > 0
        self.record.check("tests on the GPU", right, f"{self.said} (exit code {code})")
        self.record.say(f"{self.said} of the tests that need a GPU")


def run(record: Record) -> None:
    """Keeps a check for each test that did not pass, and the counts of all."""
    folder = checkout()
    if folder is None or not (folder / "tests").is_dir():
        raise NotHereError("the tests are not part of an installed package; start the command in a checkout.")
    if importlib.util.find_spec("pytest") is None:
        raise NotHereError("pytest is not installed; run `pip install pytest`.")
    import pytest

    os.chdir(folder)
    reporter = Reporter(record)
    stop = threading.Timer(max(1.0, record.seconds - BEFORE_THE_END), _thread.interrupt_main)
    stop.daemon = True
    stop.start()
    reporter.finish(int(pytest.main(words_of(folder, record.work / "tests"), plugins=[reporter])))


def words_of(folder: Path, base: Path) -> list[str]:
    """The words of pytest's command line in a checkout. base: the folder for what the tests write.

    Only the files with tests for a GPU are named, since pytest imports each file that it is given: the others
    need packages that nobody installs for an hour on a GPU, and one import that fails would end them all.
    """
    files = sorted(path for path in (folder / "tests").rglob("test_*.py") if MARK in path.read_text("utf-8"))
    words = [str(path.relative_to(folder)) for path in files]
    # By the project's own settings each warning is an error: that of a setting or mark whose plugin is not
    # installed, and that a newer release of a package deprecates something. None says anything of the GPU.
    words += ["-o", "addopts=--import-mode=importlib", "-W", "default", "-m", "gpu", "-v"]
    words += ["--continue-on-collection-errors", "-p", "no:cacheprovider", "--basetemp", str(base)]
    return words
