"""NVIDIA's driver, queried through its own library: whether it is installed, and which GPUs it has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtimes.base.machine import driver_version

if TYPE_CHECKING:
    from runtimes.contract.engine import Gpu

LIBRARY = "libcuda.so.1"
# The driver's numbers for the two parts of a compute capability.
MAJOR = 75
MINOR = 76
NO_DEVICE = 100
NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """What NVIDIA's driver reports."""

    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA release that it supports, such as (13, 0). Many drivers have the same one."""
    version: str | None = None  # version of the driver, such as 580.65.06; None if unknown
    fault: str | None = None  # why no GPU can be used, as a part of a sentence; None if one can


def ask_driver() -> DriverFacts:
    """The GPUs of this machine in the order of their numbers, or why there is none."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return DriverFacts(fault=f"no NVIDIA driver is installed ({LIBRARY} cannot be loaded)")
    count = ctypes.c_int()
    try:
        code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except AttributeError:
        return DriverFacts(fault=f"{LIBRARY} is no library of an NVIDIA driver")
    if code:
        what = "finds no GPU" if code == NO_DEVICE else "cannot start"
        return DriverFacts(fault=f"the NVIDIA driver {what} (CUDA error {code})")
    if not count.value:
        return DriverFacts(fault="the NVIDIA driver finds no GPU")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))  # 13000 for 13.0
    release = (number.value // 1000, number.value % 1000 // 10)
    gpus = tuple(_gpu(cuda, number) for number in range(count.value))
    return DriverFacts(gpus=gpus, cuda=release, version=driver_version())


def _gpu(cuda: ctypes.CDLL, number: int) -> Gpu:
    from runtimes.contract.engine import Gpu  # needed only if there is a GPU

    device = ctypes.c_int()
    value = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    name = ctypes.create_string_buffer(NAME_BYTES)
    cuda.cuDeviceGetName(name, NAME_BYTES, device)
    parts = []
    for attribute in (MAJOR, MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(str(value.value))
    return Gpu(name=name.value.decode("utf-8", "replace"), compute_capability=".".join(parts))
