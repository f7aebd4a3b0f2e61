"""What a library of the fused operator is compiled from and with, and which processors run it.

`setup.py` reads this file without the package, so it imports nothing of the project.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCES = (
    "library.cpp",
    "vendor/onnxruntime/onnxruntime_c_api.h",
    "layer.hpp",
    "node.hpp",
    "attention.hpp",
    "block.hpp",
    "pack.hpp",
    "token.hpp",
    "matrix.hpp",
    "head.hpp",
    "numbers.hpp",
    "half.hpp",
    "vectors.hpp",
)
# Hidden symbols: two libraries in one process, each for other instructions, must not share a function or a
# table. Without this the dynamic linker would join their inline variables. -ffast-math must not be here:
# masked scores are minus infinity, and a NaN in the memory must reach the answer.
FLAGS = ("-std=c++17", "-O3", "-fwrapv", "-fPIC", "-fvisibility=hidden", "-w")
NATIVE = ("-march=native",)
HASHES = "hashes.json"  # of the package's libraries, next to them


class Variant(NamedTuple):
    """A library for the processors of an architecture that have some features."""

    name: str
    features: tuple[str, ...]  # by the operating system's names (see `processor.features`)
    flags: tuple[str, ...]  # of the compiler, for exactly these features

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
