"""What a process sets before PyTorch loads, and how it finds out whether other jobs run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtimes.base import machine, startup

ROOT = Path(__file__).parents[3]
# Where PyTorch is loaded, it is too late to set anything.
TRAIN = """
import os, sys
from importlib.abc import MetaPathFinder
class Recorder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Recorder())
from runtimes.base import machine
machine.busy_cpus = lambda seconds: float(sys.argv[1])
machine.available_cpus = lambda: 2
exec(sys.argv[2])
"""
COMMAND = """
from xl_export.cli.main import main
main(["train", "tiny", "--out", "run"], prog_name="xl-export")
"""


def test_the_work_of_others_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither idle nor waiting counts, and what the host of a virtual machine has taken does."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    stat.write_text("cpu  10 0 5 900 7 1 1 0 0 0\ncpu0 …\n")
    monkeypatch.setattr(
        machine.time, "sleep", lambda _: stat.write_text("cpu  60 0 15 940 7 1 1 20 0 0\ncpu0 …\n")
    )
    assert machine.busy_cpus(2.0) == pytest.approx((50 + 10 + 20) / 100 / 2)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of two idle CPUs that has set nothing yet and has not loaded PyTorch."""
    for name in (startup.SPIN, *startup.DEFAULTS):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(startup, "_own", set())
    monkeypatch.setattr(machine, "available_cpus", lambda: 2)
    monkeypatch.setattr(machine, "busy_cpus", lambda seconds: 0.1)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def refuse(seconds: float) -> float:
    raise OSError("there is no load average")


@pytest.mark.parametrize(
    ("cpus", "busy", "spins"),
    [
        (2, lambda seconds: 0.1, startup.SPINS),
        (2, lambda seconds: 0.5, None),  # other jobs run
        (64, lambda seconds: 2.0, None),  # a few jobs on many processors
        (2, refuse, None),
    ],
)
def test_threads_of_a_training_spin_only_on_an_idle_machine(
    fresh: None, cpus: int, busy: Any, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: cpus)
    monkeypatch.setattr(machine, "busy_cpus", busy)
    startup.prepare_libraries()  # as every command does when it starts
    startup.prepare_training()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get(startup.SPIN)) == ("PASSIVE", spins)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", startup.SPIN])
def test_what_the_user_has_chosen_for_threads_stays(
    fresh: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "7")
    startup.prepare_training()
    assert os.environ[name] == "7"
    assert (startup.SPIN in os.environ) == (name == startup.SPIN)


@pytest.mark.parametrize(
    ("program", "busy", "found"),
    [(COMMAND, 0.0, startup.SPINS), ("import trainer; trainer.TrainConfig; trainer.train", 1.0, "None")],
    ids=["command", "Python"],
)
def test_train_decides_it_before_pytorch_loads(busy: float, found: str, program: str, tmp_path: Path) -> None:
    unset = ("OMP_WAIT_POLICY", startup.SPIN)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    answer = subprocess.run(
        [sys.executable, "-c", TRAIN, str(busy), program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert answer.stdout.split() == [found]
