"""`xl-export train --processes N` trains the run of one process, and one sentence says what ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import xl_export
from runtimes.base.files import write_json
from runtimes.base.machine import available_cpus
from runtimes.base.records import to_json
from tests.commands import refused, xl
from tests.trainer.training.runs import longer, metrics
from trainer.run.config import TrainConfig
from trainer.training.loop import resume, train

Make = Callable[..., TrainConfig]
ROOT = Path(xl_export.__file__).parents[1]
# As the installed command starts: the working folder is not on the module path.
COMMAND = (
    f"import sys; sys.path[0] = {str(ROOT)!r}; from xl_export.cli.main import main; "
    "main(prog_name='xl-export')"
)


def started(*arguments: str | Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )


def ended(*arguments: str | Path, folder: Path) -> tuple[int, str, str]:
    """Exit code and output."""
    process = started(*arguments, folder=folder)
    output, errors = process.communicate(timeout=280)
    return process.returncode, output, errors


def wait_until_trained(process: subprocess.Popen[str], run: Path) -> None:
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 10):
        time.sleep(0.01)


def test_two_processes_continue_the_run_of_one(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process, then two, then one again, with parts of the batch and lengths that change, against one
    from beginning to end. The working folder holds files with the names of our packages, which must not be
    imported.
    """
    recipe: dict[str, Any] = {"batch": 8, "accumulate": 2, "schedule": "constant", "validate_every": 3}
    recipe |= {"checkpoint_every": 3, "mem_len_schedule": ((2, 5), (5, 11)), "threads": 0}
    shared = train(make_config(steps=6, **recipe), tmp_path / "shared", progress=False)
    longer(shared, 9)
    for name in ("trainer.py", "runtimes.py", "xl_export.py"):
        (tmp_path / name).write_text("raise SystemExit('this file of the user was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    capfd.readouterr()
    result = xl("train", "--resume", "shared", "--processes", 2)
    output, errors = capfd.readouterr()
    assert result.exit_code == 0, result.output + errors
    assert output.splitlines()[-1] == "shared is trained; next: xl-export export shared --out artefact"
    assert output.count("is trained; next") == output.count("step 9: validation") == 1
    state = load_file(shared / "training.safetensors")
    assert len(state["random"]) == 2, "two processes"
    assert state["memory.0"].shape == (8, 11, 16), "the memory of all lanes"
    longer(shared, 10)
    resume(shared, progress=False)
    alone = train(make_config(steps=10, **recipe), tmp_path / "alone", progress=False)
    found, expected = (
        [line["loss_nats"] for line in metrics(run) if "loss_nats" in line] for run in (shared, alone)
    )
    assert len(expected) == 10
    assert found == pytest.approx(expected, abs=1e-5)
    state, other = (load_file(run / "training.safetensors") for run in (shared, alone))
    assert len(state["random"]) == 1
    for name in sorted(set(state) - {"random"}):
        torch.testing.assert_close(
            state[name], other[name], rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow  # four processes that import PyTorch one after the other
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_says_how_to_resume(
    number: signal.Signals, code: int, make_config: Make, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", to_json(make_config(steps=10**6, checkpoint_every=3, threads=0)))
    process = started("config.json", "--out", "run", "--processes", "2", folder=tmp_path)
    wait_until_trained(process, tmp_path / "run")
    children = [
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    assert len(children) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == code, errors
    assert errors.strip() == (
        "stopped; the last checkpoint is kept: continue with `xl-export train --resume run`"
    )
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "no process is left behind"
    result = xl("info", tmp_path / "run", "--all")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_a_process_that_is_killed_is_named(make_config: Make, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", to_json(make_config(steps=10**6, checkpoint_every=3, threads=0)))
    process = started("config.json", "--out", "run", "--processes", "2", folder=tmp_path)
    wait_until_trained(process, tmp_path / "run")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 2
    assert errors.startswith("Error: process ")
    assert " of 2 was ended by SIGKILL; the last checkpoint is kept" in errors
    assert errors.count("\n") == 1, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 1e30, "warmup_steps": 0}, "became nan at step 2"),  # found by the first process
        ({"text": "none.txt"}, "none.txt could not be read"),  # found by every process
    ],
)
def test_a_mistake_that_the_processes_find_is_one_sentence(
    change: dict[str, object], words: str, make_config: Make, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", to_json(make_config(threads=0, **change)))
    code, output, errors = ended("config.json", "--out", "run", "--processes", "2", folder=tmp_path)
    assert code == 2
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1, errors
    assert words in errors
    assert "is trained" not in output


def test_processes_are_refused_under_torchrun(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", to_json(make_config()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ("train", tmp_path / "config.json", "--out", tmp_path / "run", "--processes", 2)
    refused(xl(*command), "torchrun had started", "leave out --processes")


def test_every_process_has_its_share_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.training import launch

    seen: list[str | None] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.distributed.run.run", lambda _: seen.append(os.environ.get("OMP_NUM_THREADS")))
    launch.launch(["true"], 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch.launch(["true"], 2)
    assert seen == [str(max(1, available_cpus() // 2)), "7"]
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert launch.REPORTS not in os.environ
