"""The features of this processor, by the names that Linux uses."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AT_HWCAP = 16  # the entry of the auxiliary vector that holds the features below
ARM_FEATURES = {"asimd": 1}  # bits, from Linux's asm/hwcap.h


def features() -> frozenset[str]:
    """The features of this processor that the operating system lets programs use; empty if it lists none.

    x86 lists them in /proc/cpuinfo. ARM passes them to every process, which is correct under an emulator too;
    /proc/cpuinfo may describe the emulating machine there.
    """
    if platform.machine() == "aarch64":
        return _arm_features()
    return frozenset(listed().partition(":")[2].split())


def listed() -> str:
    """The line of /proc/cpuinfo with the processor's features."""
    if not CPUINFO.is_file():
        return platform.processor()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _arm_features() -> frozenset[str]:
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):  # a C library without the function
        return frozenset()
    getauxval.restype = ctypes.c_ulong
    getauxval.argtypes = [ctypes.c_ulong]
    bits = getauxval(AT_HWCAP)
    return frozenset(name for name, bit in ARM_FEATURES.items() if bits >> bit & 1)
