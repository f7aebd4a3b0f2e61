"""`--try` for `xl-export devices`, a command of the edge: the first minute on an NVIDIA GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

from runtimes.base.errors import MissingPackageError, UserError, needs
from runtimes.base.records import to_json
from runtimes.cli.devices import devices_command as devices_at_the_edge
from runtimes.cli.options import show
from runtimes.contract.engine import NAMES, Flavour
from runtimes.sessions.fused_cpu import built
from runtimes.sessions.open import open_session
from runtimes.sessions.ort_gpu.driver import ask_driver
from runtimes.tasks.check import check
from xl_export.cli.options import extended
from xl_export.demo.shipped import find_shipped

REPORT = "please report this line with the output of `xl-export devices`"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one trial found. passed: None if it could not be made here."""

    name: str
    passed: bool | None
    sentence: str
    """What was computed, or why not and what to do."""
    seconds: float

    @property
    def line(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "not tried"}[self.passed]
        return f"{self.name}: {verdict}: {self.sentence}"


def trials() -> Iterator[Trial]:
    """Trials of the first GPU, the smallest first. Without a GPU the kernels are executed on the CPU, if the
    checkout has the emulator of its tests.
    """
    facts = ask_driver()
    if facts.fault:
        yield Trial(
            name="GPU",
            passed=None,
            sentence=f"{facts.fault}, so nothing was computed on a GPU. The CPU can run every artefact; "
            "engines need an NVIDIA GPU.",
            seconds=0.0,
        )
        try:
            emulator = import_module("tests.ptx.driver")
        except ImportError:
            return
        yield _trial("kernels, emulated", lambda: _kernels(emulator.EmulatedDriver(80, multiprocessors=4)))
        return
    yield _trial("kernels", lambda: _kernels(_driver()))
    yield _trial("cuda", _bundled_model)
    yield _trial("cuda, attention as one node", _node)
    flavours: dict[Flavour, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
    for flavour, package in flavours.items():
        if find_spec(package):
            yield _trial(NAMES[flavour], lambda flavour=flavour: _engine(flavour))  # type: ignore[misc]


def _trial(name: str, run: Callable[[], tuple[bool | None, str]]) -> Trial:
    """run: says whether it passed, in what words; it raises MissingPackageError if it needs something that is
    not usable here, and another UserError if it fails.
    """
    began = time.perf_counter()
    try:
        passed, sentence = run()
    except MissingPackageError as error:
        passed, sentence = None, str(error)
    except UserError as error:
        passed, sentence = False, str(error)
    return Trial(name=name, passed=passed, sentence=sentence, seconds=time.perf_counter() - began)


def _driver() -> Any:
    from xl_export.tensorrt.kernels.driver import Driver

    if find_spec("cuda") is None:
        raise MissingPackageError("cuda-bindings is not installed; run `pip install cuda-bindings`.")
    return Driver()


def _kernels(driver: Any) -> tuple[bool | None, str]:
    """Kernels of plugin engines, which were compiled before, against the naive operator."""
    from xl_export.tensorrt.kernels.driver import TOLERANCES, naive_answer, run_kernels
    from xl_export.tensorrt.kernels.ready import ready_kernels

    differences = {}
    for name, case, first, second in ready_kernels(driver.gpu.capability):
        answer = run_kernels(driver, case.inputs(), first, second).answer
        differences[name] = float(np.abs(answer - naive_answer(case)).max()) / TOLERANCES[case.dtype]
    if not differences:
        return None, f"{driver.gpu.name} is older than compute capability 7.5; use --device cpu."
    # A comparison with NaN does not hold.
    passed = all(difference <= 1 for difference in differences.values())
    found = ", ".join(f"{name} {difference:.0%}" for name, difference in differences.items())
    sentence = f"on {driver.gpu.name} the largest differences, in parts of the tolerance, are {found}"
    fix = f"; build engines with --attention native, and {REPORT}"
    return passed, f"{sentence}{'' if passed else fix}."


def _bundled_model() -> tuple[bool | None, str]:
    folder = find_shipped()
    if folder is None:
        return None, "the model examples/stories/tales is not here; run the command in a checkout."
    report = check(folder, device="cuda")
    fix = f"; use --device cpu, and {REPORT}"
    return report.passed, f"{folder.name}: {report.sentence}{'' if report.passed else fix}."


def _node() -> tuple[bool | None, str]:
    """A small model of random weights, whose attention is one kernel launch per layer."""
    if not _can_export():
        return None, "PyTorch exports the small model for it; export one elsewhere and run `xl-export check`."
    if built() is None:  # a session would run the graph without the node
        return None, "the library with the node is not built; run `xl-export fused-kernel`."
    from xl_export.demo.tiny import export_tiny

    with tempfile.TemporaryDirectory() as folder:
        report = check(export_tiny(Path(folder), attention="plugin"), device="cuda")
    fix = f"; export without --attention-as, and {REPORT}"
    return report.passed, f"{report.sentence}{'' if report.passed else fix}."


def _can_export() -> bool:
    return all(find_spec(package) for package in ("torch", "onnx_ir", "safetensors"))


def _engine(flavour: Flavour) -> tuple[bool | None, str]:
    """A small engine of random weights is built, checked and timed."""
    gpu = ask_driver().gpus[0]
    if not _can_export():
        return None, "PyTorch exports the small model for it; export one elsewhere and run `xl-export build`."
    with needs("tensorrt,export", "tensorrt", "onnx", "tqdm", "torch"):
        from xl_export.demo.tiny import export_tiny
        from xl_export.tensorrt.build import build
        from xl_export.tensorrt.options import TARGETS, BuildOptions
    if flavour == "rtx" and gpu.compute_capability not in TARGETS:
        return None, (
            f"it does not support {gpu.name} (compute capability {gpu.compute_capability}), only "
            f"{', '.join(TARGETS)}; use --device cuda or TensorRT."
        )
    with tempfile.TemporaryDirectory() as folder:
        artefact, engine = export_tiny(Path(folder), target="tensorrt"), Path(folder) / "engine"
        facts = build(
            artefact,
            engine,
            BuildOptions(
                flavour=flavour,
                compute_capabilities=(gpu.compute_capability,) if flavour == "rtx" else (),
                optimization_level=1,
            ),
        )
        report = check(engine)
        session = open_session(engine)
        memory, ids = session.start(1), np.zeros((1, 1), np.int64)
        took = []
        for _ in range(200):
            began = time.perf_counter()
            _, memory = session.step(ids, memory)
            took.append(time.perf_counter() - began)
    sentence = f"built in {facts.seconds:.0f} s, {np.median(took) * 1e3:.2f} ms a token; {report.sentence}"
    return report.passed, f"{sentence}{'' if report.passed else f'; {REPORT}'}."


def try_devices(as_json: bool, attempt: bool) -> None:
    """Prints each trial as it ends."""
    found = []
    for trial in trials():
        found.append(trial)
        if not as_json:
            show({}, [trial.line], as_json=False)
    if as_json:
        show({"trials": [to_json(trial) for trial in found]}, [], as_json=True)
    if any(trial.passed is False for trial in found):
        raise SystemExit(1)


devices_command = extended(
    devices_at_the_edge,
    [
        click.Option(
            ["--try", "attempt"], is_flag=True, help="Compute on the first NVIDIA GPU, in about a minute."
        )
    ],
    try_devices,
    "With --try the first NVIDIA GPU computes: the kernels of plugin engines, a model of examples/ on cuda, "
    "attention as one node and, if TensorRT is installed, a small engine. Each trial prints one line, with "
    "what to do if it failed. The exit code is 1 if one failed, otherwise 0. What is not installed, or does "
    "not support the GPU, is not tried.",
)
