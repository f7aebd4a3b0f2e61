"""The first step: what this machine is, and whether it has an NVIDIA GPU that can be used."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.results import NO_GPU
from benchmarks.machine import machine_facts
from runtimes.base.errors import first_line
from runtimes.sessions.ort_gpu.driver import ask_driver
from runtimes.tasks.devices import list_devices

PACKAGES = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "triton",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-cu13",
    "tensorrt-cu13-libs",
    "tensorrt-cu12",
    "tensorrt-cu12-libs",
    "tensorrt-rtx",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Sections of nvidia-smi without serial numbers and without the processes of other people.
SECTIONS = "MEMORY,UTILIZATION,ECC,TEMPERATURE,POWER,CLOCK,COMPUTE,PERFORMANCE"
SMI = {
    "driver": "driver_version",
    "memory of the GPU": "memory.total",
    "clocks now, of the GPU and its memory": "clocks.sm,clocks.mem",
    "highest clocks": "clocks.max.sm,clocks.max.mem",
    "limit of power": "power.limit",
}
JETSON = (Path("/etc/nv_tegra_release"), Path("/proc/device-tree/model"))


def run(record: Record) -> None:
    """Keeps the facts of the machine; `no GPU` says why no GPU can be used."""
    driver = ask_driver()
    if driver.fault:
        record.fact(NO_GPU, driver.fault)
    else:
        record.fact("GPU", driver.gpus[0].name)
        gpus = [f"{gpu.name} (compute capability {gpu.compute_capability})" for gpu in driver.gpus]
        record.fact("GPUs", ", ".join(gpus))
        record.fact("CUDA of the driver", ".".join(map(str, driver.cuda)))
    for name, value in machine_facts().items():
        names = {"cpu": "CPU", "cpus": "CPUs", "memory_bytes": "memory of the CPU", "busy_cpus": "CPUs busy"}
        names["threads_wait"] = "waiting threads"
        record.fact(names.get(name, name), f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else value)
    record.fact("Python", platform.python_version())
    record.fact("kernel of the system", platform.release().partition("-")[0])
    for path in JETSON:
        if path.is_file():
            record.fact(path.name, path.read_text(encoding="utf-8", errors="replace").strip("\0\n "))
    for package in PACKAGES:
        try:
            record.fact(package, version(package))
        except PackageNotFoundError:
            continue
    if shutil.which("nvidia-smi"):
        for name, query in SMI.items():
            _ask(record, name, _nvidia_smi, f"--query-gpu={query}", "--format=csv,noheader")
        with record.attempt("nvidia-smi"):  # it waits for ever where the driver does
            print(_nvidia_smi("-q", "-d", SECTIONS))  # into what the step has printed
    _ask(record, "CUDA of PyTorch", _torch_facts)
    with record.attempt("devices"):
        for report in list_devices():
            usable = "usable" if report.usable else "not usable"
            record.fact(f"{report.computes} on {report.device}", f"{usable}: {report.sentence}")
    record.say(f"no NVIDIA GPU: {driver.fault}" if driver.fault else record.result.facts["GPUs"])


def _ask(record: Record, name: str, question: Callable[..., object], *arguments: str) -> None:
    """Keeps the answer to a question as a fact; a package that cannot be loaded is an answer."""
    try:
        answer = question(*arguments)
    except ModuleNotFoundError as error:
        answer = f"{error.name} is not installed"
    except Exception as error:  # libraries raise errors of every kind when they are loaded
        answer = f"could not be asked: {type(error).__name__}, {first_line(error):.200}"
    record.fact(name, answer)


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr.strip()


def _torch_facts() -> str:
    import torch

    seen = f", {torch.cuda.device_count()} GPU(s) seen" if torch.cuda.is_available() else ", no GPU seen"
    return f"{torch.version.cuda or 'built without CUDA'}{seen}"
