"""`xl-export devices --try`: one line for each trial, and an exit code."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import sides
from runtimes.base.errors import MissingPackageError
from runtimes.sessions.ort_gpu.driver import DriverFacts
from runtimes.tasks.check import check
from tests import fake_gpu
from tests.commands import xl
from tests.gpu import stand_ins
from tests.ptx.driver import EmulatedDriver
from xl_export.cli import devices
from xl_export.tensorrt import build
from xl_export.tensorrt.kernels import driver, ready

READY = ready.ready_kernels


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are emulated, and whose models the CPU computes."""
    stand_ins.install(monkeypatch)
    facts = DriverFacts(gpus=(fake_gpu.GPU,), cuda=(13, 0))
    monkeypatch.setattr(devices, "ask_driver", lambda: facts)
    monkeypatch.setattr(driver, "Driver", lambda: EmulatedDriver(89, multiprocessors=4))
    monkeypatch.setattr(build, "build", sides.build)
    # The test without a GPU emulates all of them.
    monkeypatch.setattr(ready, "ready_kernels", lambda capability: itertools.islice(READY(capability), 1))
    on_cpu = lambda folder, device="auto": check(folder, device="cpu" if device == "cuda" else device)  # noqa: E731
    monkeypatch.setattr(devices, "check", on_cpu)
    monkeypatch.setattr(devices, "built", lambda: Path("library.so"))


@pytest.mark.usefixtures("gpu")
def test_every_trial_that_passes_is_one_line() -> None:
    result = xl("devices", "--try")
    assert result.exit_code == 0, result.output
    names = ("kernels", "cuda", "cuda, attention as one node", "TensorRT", "TensorRT-RTX")
    assert [line.partition(": passed: ")[0] for line in result.stdout.splitlines()] == list(names)


@pytest.mark.usefixtures("gpu")
def test_a_wrong_answer_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    right = driver.run_kernels

    def wrong(*arguments: Any) -> driver.Answer:
        answer = right(*arguments)
        return replace(answer, answer=np.full_like(answer.answer, np.nan))

    monkeypatch.setattr(driver, "run_kernels", wrong)
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name.startswith("tensorrt") else "here")
    result = xl("devices", "--try", "--json")
    assert result.exit_code == 1
    kernels, *others = json.loads(result.stdout)["trials"]
    assert [kernels["passed"], *(other["passed"] for other in others)] == [False, True, True]
    assert "build engines with --attention native" in kernels["sentence"]


@pytest.mark.usefixtures("gpu")
def test_a_node_without_its_library_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "built", lambda: None)
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name.startswith("tensorrt") else "here")
    *_, node = json.loads(xl("devices", "--try", "--json").stdout)["trials"]
    assert (node["passed"], node["sentence"].partition("; ")[2]) == (None, "run `xl-export fused-kernel`.")


NOT_TRIED = {"TensorRT-RTX": "9.0", "kernels": "7.0"}  # an H100 and a V100


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", NOT_TRIED)
def test_what_does_not_support_the_gpu_is_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(fake_gpu.GPU, compute_capability=NOT_TRIED[name])
    monkeypatch.setattr(devices, "ask_driver", lambda: DriverFacts(gpus=(gpu,), cuda=(13, 0)))
    if name == "kernels":
        monkeypatch.setattr(ready, "ready_kernels", lambda capability: [])
    monkeypatch.setattr(devices, "find_spec", lambda package: None if package == "tensorrt" else "here")
    result = xl("devices", "--try", "--json")
    assert result.exit_code == 0, result.output
    trials = {trial["name"]: trial for trial in json.loads(result.stdout)["trials"]}
    assert trials[name]["passed"] is None
    assert gpu.compute_capability in trials["TensorRT-RTX"]["sentence"]


@pytest.mark.usefixtures("gpu")
def test_a_package_that_is_missing_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MissingPackageError("it is not installed; run pip.")

    monkeypatch.setattr(devices, "check", missing)
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name == "tensorrt" else "here")
    monkeypatch.setattr(devices, "_driver", missing)
    result = xl("devices", "--try", "--json")
    assert result.exit_code == 0, result.output
    assert not any(trial["passed"] for trial in json.loads(result.stdout)["trials"])


# Only the packages that run artefacts are installed.
WITHOUT_GPU = """
import sys
sys.modules |= dict.fromkeys(("onnx", "torch", "triton"))
from runtimes.sessions.ort_gpu.driver import DriverFacts
from xl_export.cli import devices
devices.ask_driver = lambda: DriverFacts(fault="no NVIDIA driver is installed")
devices.try_devices(as_json=False, attempt=True)
"""


def test_without_a_gpu_the_kernels_are_emulated() -> None:
    command = [sys.executable, "-c", WITHOUT_GPU]
    result = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    none, emulated = result.stdout.splitlines()
    assert none.startswith("GPU: not tried: no NVIDIA driver is installed, so nothing was computed on a GPU.")
    assert emulated.startswith("kernels, emulated: passed: on the emulator")


def test_each_device_is_listed_under_what_it_computes() -> None:
    sections = xl("devices").stdout.partition("engines:")
    engines, _, runs = sections[2].partition("runs:")
    assert ["  cpu " in part for part in (sections[0], engines, runs)] == [True, False, True]
