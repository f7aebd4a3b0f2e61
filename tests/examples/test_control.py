"""The control loops in Python and C++ count the steps that were late and the ticks that were skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cpp.program import CPP, compiled
from tests.examples.conftest import EXAMPLES

CARTPOLE = EXAMPLES / "policy" / "cartpole"
TICKS = 300


@pytest.fixture(params=["python", "cpp"])
def program(request: pytest.FixtureRequest) -> list[str | Path]:
    if request.param == "python":
        return [sys.executable, EXAMPLES / "control.py"]
    return [compiled(CPP / "examples" / "control.cpp", "-O0")]


@pytest.mark.parametrize("hz", [200_000, 1000])  # no step ends within 5 µs
def test_the_log_has_every_step_and_the_summary_counts_them(
    program: list[str | Path], hz: int, tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    command = [*program, CARTPOLE, "--hz", str(hz), "--ticks", str(TICKS), "--log", log]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert log.read_text().splitlines()[0] == "tick,compute_ms,answer_ms"
    ticks, compute_ms, answer_ms = np.loadtxt(log, delimiter=",", skiprows=1, ndmin=2).T
    assert ticks[0] == 0
    assert (np.diff(ticks) > 0).all()
    assert ticks[-1] < TICKS
    assert ((compute_ms > 0) & (compute_ms <= answer_ms)).all()
    late, skipped = (answer_ms > 1e3 / hz).sum(), TICKS - len(ticks)
    assert "passed" in printed.splitlines()[0]
    assert re.search(rf"^{TICKS} ticks at \d+ Hz: {late} steps late, {skipped} ticks skipped$", printed, re.M)
    if hz > 1000:
        assert late == len(ticks)
        assert skipped


@pytest.mark.parametrize(("option", "value"), [("--priority", "100"), ("--cpu", "1000")])
def test_a_setting_that_the_system_refuses_ends_the_program(
    program: list[str | Path], option: str, value: str
) -> None:
    ended = subprocess.run([*program, CARTPOLE, option, value], capture_output=True, text=True)
    assert ended.returncode in (1, 2)
    assert f"{option} was refused" in ended.stderr
