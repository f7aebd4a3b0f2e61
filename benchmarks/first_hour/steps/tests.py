"""The project's own tests that need a GPU, run by pytest in a checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.machine import checkout

PASSED, NONE_COLLECTED = 0, 5  # exit codes of pytest
SENTENCE = 300  # characters


def run(record: Record) -> None:
    """Keeps a check for each test that did not pass, and the counts of all."""
    folder = checkout()
    if folder is None or not (folder / "tests").is_dir():
        raise NotHereError("the tests are not part of an installed package; start the command in a checkout.")
    if importlib.util.find_spec("pytest") is None:
        raise NotHereError("pytest is not installed; run `pip install pytest`.")
    report = record.path.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", "--basetemp", str(record.work / "tests")], cwd=folder
    )
    if not report.is_file():
        raise RuntimeError(f"pytest ended with exit code {done.returncode} and wrote no report")
    keep(record, report, code=done.returncode)


def keep(record: Record, report: Path, *, code: int) -> None:
    """Keeps what pytest's report says."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    reasons: dict[str, int] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        skipped = case.find("skipped")
        if problem is not None:
            counts["failed"] += 1
            name = f"{case.get('classname', '')}.{case.get('name', '')}"
            record.check(name, False, " ".join((problem.get("message") or "").split())[:SENTENCE])
        elif skipped is not None:
            counts["skipped"] += 1
            reason = skipped.get("message") or "no reason"
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    for reason, count in reasons.items():
        record.fact(f"{count} skipped", reason)
    right = code == PASSED and counts["passed"] > 0
    record.check("tests on the GPU", right, f"{said} (exit code {code})")
    record.say(f"{said} of the tests that need a GPU")
