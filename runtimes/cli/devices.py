"""`xl-export devices`: what this machine can compute on, and what to install for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import click

from runtimes.base.errors import MissingPackageError, UserError, first_line, install
from runtimes.base.machine import available_cpus
from runtimes.base.records import to_json
from runtimes.base.startup import load_onnxruntime
from runtimes.cli.options import json_option, show
from runtimes.contract.device import Kind
from runtimes.contract.engine import Flavour, Gpu
from runtimes.sessions import fused_cpu
from runtimes.sessions.ort_gpu.driver import ask_driver
from runtimes.sessions.ort_gpu.packages import fault_of_both
from runtimes.sessions.ort_gpu.provider import PROVIDER
from runtimes.sessions.tensorrt.device_memory import Cuda
from runtimes.sessions.tensorrt.module import load_tensorrt

Folders = Literal["artefacts", "engines", "runs"]
BEST_FIRST: tuple[Kind, ...] = ("cuda", "mps", "cpu")  # devices of runs


@click.command("devices")
@json_option
def devices_command(as_json: bool) -> None:
    """List what this machine can compute on.

    For each device that --device takes there is one line: what computes, or why the device cannot be used and
    what to install. A device that is listed as usable has its packages, its libraries, a driver, and code for
    a GPU of this machine; whether its answers are right is tested when an artefact is opened, and by
    `xl-export check`.
    """
    found = list_devices()
    said = hints()
    lines = []
    for kind in ("artefacts", "engines", "runs"):
        lines.append(f"{kind}:")
        for report in found:
            if report.computes == kind:
                state = "usable" if report.usable else "-"
                lines.append(f"  {report.device:<17} {state:<7} {report.sentence}")
    document = {"devices": [to_json(report) for report in found], "hints": said}
    show(document, [*lines, *said], as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device of this machine."""

    device: Kind
    """Name that `--device` accepts."""
    computes: Folders
    """Kind of folder that it computes."""
    usable: bool
    """Whether it can be used now, as far as one can tell without a folder."""
    sentence: str
    """What is there; or why it cannot be used, and what to install."""


def list_devices() -> list[DeviceReport]:
    """Every device that xl-export knows, usable or not, the best of each kind of folder first.

    It loads the packages that are installed, and computes nothing. Only opening a folder shows whether its
    answers are right there.
    """
    return [
        _report("cuda", "artefacts", _onnxruntime_on_gpu),
        _report("cpu", "artefacts", _onnxruntime_on_cpu),
        _report("tensorrt", "engines", _engines, "tensorrt"),
        _report("tensorrt-rtx", "engines", _engines, "rtx"),
        *(_report(kind, "runs", _torch, kind) for kind in BEST_FIRST),
    ]


def hints() -> list[str]:
    """What is wrong with this installation as a whole, a sentence each."""
    fault = fault_of_both()
    return [] if fault is None else [f"{fault}."]


def _report(device: Kind, computes: Folders, ask: Callable[..., str], *arguments: str) -> DeviceReport:
    """The report of a device. ask: returns what is there, and raises UserError if it cannot be used."""
    try:
        return DeviceReport(device=device, computes=computes, usable=True, sentence=ask(*arguments))
    except UserError as error:
        return DeviceReport(device=device, computes=computes, usable=False, sentence=str(error))


def _onnxruntime_on_cpu() -> str:
    ort = load_onnxruntime()
    variant = fused_cpu.variant()
    operator = f"with the fused operator ({variant})" if variant else "without the fused operator"
    return f"ONNX Runtime {ort.__version__} on {available_cpus()} CPUs, {operator}."


def _onnxruntime_on_gpu() -> str:
    ort = load_onnxruntime()
    if fault := PROVIDER.fault(ort):
        raise MissingPackageError(f"{fault}.")
    gpus = [gpu for gpu in ask_driver().gpus if not PROVIDER.without_code(ort, gpu)]
    return f"CUDA of ONNX Runtime {ort.__version__} on {_named(gpus)}."


def _engines(flavour: Flavour) -> str:
    trt = load_tensorrt(flavour)
    if fault := ask_driver().fault:
        raise MissingPackageError(
            f"{trt.__name__} {trt.__version__} is installed, and {fault}; install the driver of this "
            "machine's GPU."
        )
    Cuda()
    return f"{trt.__name__} {trt.__version__} on {_gpus()}."


def _gpus() -> str:
    return _named(ask_driver().gpus)


def _named(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{gpu.name} ({gpu.compute_capability})" for gpu in gpus)


def _torch(kind: Kind) -> str:
    if find_spec("torch") is None:
        raise MissingPackageError(f"PyTorch is not installed; run {install('train')}.")
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"PyTorch is installed and could not be loaded ({first_line(error):.200}); run "
            f"{install('train')}."
        ) from error
    name = f"PyTorch {torch.__version__}"
    if kind == "cpu":
        return f"{name} on {available_cpus()} CPUs."
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise MissingPackageError("this is no Mac with Metal, which mps needs; give another device.")
        return f"{name} on this Mac's GPU."
    if torch.version.cuda is None:
        raise MissingPackageError(
            f"{name} is built without CUDA; install PyTorch for CUDA as https://pytorch.org says."
        )
    if not torch.cuda.is_available():
        fault = ask_driver().fault or f"the driver does not serve CUDA {torch.version.cuda}"
        raise MissingPackageError(
            f"{name} finds no GPU: {fault}; install or update the driver of this machine's GPU."
        )
    return f"{name} on {_gpus()}."
