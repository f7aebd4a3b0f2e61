"""What a library of the fused operator is compiled from and with, and which processors run it.

`setup.py` reads this file without the package, so it imports nothing of the project.
"""

from __future__ import annotations

import ctypes
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
    "softmax.hpp",
    "head.hpp",
    "numbers.hpp",
    "half.hpp",
    "vectors.hpp",
    "../ort_gpu/operator.hpp",  # of another device, in the same library
    "../ort_gpu/kernels.hpp",
)
# Hidden symbols: two libraries in one process, each for other instructions, must not share a function or a
# table. Without this the dynamic linker would join their inline variables. -ffast-math must not be here:
# masked scores are minus infinity, and a NaN in the memory must reach the answer.
FLAGS = ("-std=c++17", "-O2", "-fwrapv", "-fPIC", "-fvisibility=hidden", "-w")
NATIVE = ("-march=native",)
CPUINFO = Path("/proc/cpuinfo")
AT_HWCAP = 16  # the entry of the auxiliary vector that holds the features below
ARM_FEATURES = {"asimd": 1}  # bits, from Linux's asm/hwcap.h


class Variant(NamedTuple):
    """A library for the processors of an architecture that have some features."""

    name: str
    features: tuple[str, ...]  # by the operating system's names (see `features`)
    flags: tuple[str, ...]  # compiler flags for exactly these features

    @property
    def file(self) -> str:
        return f"fused-{self.name}.so"


_SSE4 = ("ssse3", "sse4_1", "sse4_2", "popcnt")
_AVX2 = (*_SSE4, "avx", "avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def _x86(name: str, features: tuple[str, ...]) -> Variant:
    flags = tuple(f"-m{feature.replace('sse4_', 'sse4.')}" for feature in features)
    return Variant(name, features, ("-march=x86-64", "-mtune=generic", *flags))


# By the name of the machine's architecture: from the variant that most processors run to the fastest one.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (_x86("sse4", _SSE4), _x86("avx2", _AVX2), _x86("avx512", _AVX512)),
    # With half precision and dot products (armv8.2-a+fp16+dotprod) GCC writes the very same code: every
    # 64-bit ARM processor converts halves, and products are of floats or of 16-bit integers.
    "aarch64": (Variant("neon", ("asimd",), ("-march=armv8-a",)),),
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
    bits = getauxval(AT_HWCAP)
    return frozenset(name for name, bit in ARM_FEATURES.items() if bits >> bit & 1)
