"""What a library of the fused operator is compiled from and with, and which processors run it.

`setup.py` reads this file without the package, so it imports nothing of the project. `CMakeLists.txt` reads
`variants.json` too.
"""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path
from typing import NamedTuple

SOURCES = (
    "library.cpp",
    "vendor/onnxruntime/onnxruntime_c_api.h",
    "layer.hpp",
    "node.hpp",
    "load.hpp",
    "attention.hpp",
    "block.hpp",
    "pack.hpp",
    "token.hpp",
    "matrix.hpp",
    "products.hpp",
    "softmax.hpp",
    "head.hpp",
    "numbers.hpp",
    "half.hpp",
    "vectors.hpp",
    "../ort_gpu/operator.hpp",  # of another device, in the same library
    "../ort_gpu/product.hpp",
    "../ort_gpu/kernels.hpp",
)
_LISTED = json.loads(Path(__file__).with_name("variants.json").read_text(encoding="utf-8"))
# Hidden symbols: two libraries in one process, each for other instructions, must not share a function or a
# table. Without this the dynamic linker would join their inline variables. -ffast-math must not be here:
# masked scores are minus infinity, and a NaN in the memory must reach the answer.
FLAGS: tuple[str, ...] = tuple(_LISTED["flags"])
NATIVE = ("-march=native",)
CPUINFO = Path("/proc/cpuinfo")
# ARM's features: the entry of the auxiliary vector that holds each, and its bit, from Linux's asm/hwcap.h.
AT_HWCAP, AT_HWCAP2 = 16, 26
ARM_FEATURES = {
    "asimd": (AT_HWCAP, 1),
    "crc32": (AT_HWCAP, 7),
    "atomics": (AT_HWCAP, 8),
    "asimdrdm": (AT_HWCAP, 12),
    "asimddp": (AT_HWCAP, 20),
    "i8mm": (AT_HWCAP2, 13),
}


class Variant(NamedTuple):
    """A library for the processors of an architecture that have some features."""

    name: str
    features: tuple[str, ...]  # by the operating system's names (see `features`)
    flags: tuple[str, ...]  # compiler flags for exactly these features

    @property
    def file(self) -> str:
        return f"fused-{self.name}.so"


# By the name of the machine's architecture: from the variant that most processors run to the fastest one.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    machine: tuple(Variant(one["name"], tuple(one["features"]), tuple(one["flags"])) for one in variants)
    for machine, variants in _LISTED["variants"].items()
}


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
    return frozenset(name for name, (entry, bit) in ARM_FEATURES.items() if getauxval(entry) >> bit & 1)
