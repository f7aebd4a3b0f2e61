"""What this machine has: processors, memory and packages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from pathlib import Path

from runtimes.base.cgroup import cpu_limit, memory_limit
from runtimes.base.errors import StreamError, UserError

STAT = Path("/proc/stat")
NVML = "libnvidia-ml.so.1"  # NVIDIA's library that manages GPUs; it comes with the driver
NVML_BYTES = 80  # the buffer that NVML wants for a version
NVIDIA_MODULE = Path("/proc/driver/nvidia/version")  # the driver's version in the kernel
DRIVER_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}", re.ASCII)  # such as 580.65.06


def available_cpus() -> int:
    """The number of CPUs that this process may use: by its affinity, and by the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, cpu_limit() or cpus)


def busy_cpus(seconds: float = 1.0) -> float:
    """How many CPUs other processes use while this one sleeps; the load average on systems without /proc.

    In a container it counts the processes of the whole machine. Raises OSError if the system does not
    report it.
    """
    if not STAT.is_file():
        return os.getloadavg()[0]
    before = _worked()
    time.sleep(seconds)
    return (_worked() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _worked() -> int:
    """Clock ticks of work of all CPUs together, or that the host of a virtual machine took away."""
    user, nice, system, _idle, _waiting, *rest = map(
        int, STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + sum(rest)


def memory_bytes() -> int:
    """The bytes of memory that this process may use: the physical memory, or the limit of its container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def refuse_beyond_memory(
    num_bytes: int,
    *,
    what: str,
    fix: str,
    error: type[UserError] = StreamError,
    available: int | None = None,
) -> None:
    """Raises `error` if `num_bytes` exceeds the memory of this machine, or `available` bytes.

    what: the subject of the sentence, in the singular. fix: how to fix it, in the imperative.
    """
    available = memory_bytes() if available is None else available
    if num_bytes > available:
        raise error(
            f"{what} takes about {num_bytes / 2**30:,.0f} GiB and this "
            f"machine has {available / 2**30:.0f} GiB; {fix}."
        )


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as 580.65.06: of NVML, or else of the module in the kernel.

    None if neither is there: without a driver, and on some Jetsons.
    """
    return _version_by_nvml() or _version_by_module()


def _version_by_nvml() -> str | None:
    text = ctypes.create_string_buffer(NVML_BYTES)
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():  # as after an update of the driver without a restart of the machine
            return None
        fault = nvml.nvmlSystemGetDriverVersion(text, NVML_BYTES)
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one without these functions
        return None
    found = None if fault else DRIVER_VERSION.fullmatch(text.value.decode("ascii", "replace"))
    return found[0] if found else None


def _version_by_module() -> str | None:
    """From a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …`."""
    try:
        text = NVIDIA_MODULE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^NVRM version:.*?\s({DRIVER_VERSION.pattern})(?!\S)", text, re.M | re.ASCII)
    return found[1] if found else None


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that influence results, of those that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # importing it takes as long as opening

    installed = {}
    for package in ("xl-export", "numpy", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "torch"):
        with contextlib.suppress(PackageNotFoundError):  # or a checkout on the path
            installed[package.removesuffix("-gpu")] = version(package)
    return installed
