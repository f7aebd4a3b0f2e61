"""Compiled kernels for machines without Triton: for `devices --try`, and for the node of `cuda`.

They are for the oldest GPUs that have their instructions, so the driver of any newer GPU compiles them
too. `python -m xl_export.tensorrt.kernels.ready` writes both files again, after a change to the kernels. Both
have a hash of the kernels' sources, and the release of Triton that compiled them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtimes.base.files import read_json, write_json
from runtimes.base.records import json_text
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, Kernel, Tactic, Type, compile_kernel, tactics
from xl_export.tensorrt.kernels.driver import compile_pair

FILE = Path(__file__).with_name("ready.json")
# What the C++ operator includes (`operator.hpp` next to it).
RING_FILE = Path(__file__).parents[3] / "runtimes" / "sessions" / "ort_gpu" / "kernels.hpp"
# What the kernels are compiled from. Only a nightly test notices that `compile.py` compiles them otherwise.
SOURCES = ("common", "segment", "skew", "token", "join", "ring")
ORIGIN = "compiled from"  # the entry of FILE with the hash, and the release of Triton
# The widest heads of a kernel, and its lanes.
RING_WIDTHS = {64: 32, 128: 16}
# Of the tensors, and of the ring.
RING_TYPES: tuple[tuple[Type, Type], ...] = (
    ("float32", "float32"),
    ("float32", "float16"),
    ("float16", "float16"),
)
SEGMENT = CASES["three-tiles-of-queries"]
# A case, its tactic, and the oldest compute capability that runs it.
READY = {
    "single tokens": (dataclasses.replace(SEGMENT, T=1), tactics(SEGMENT.K, 75)[0], 75),
    "segments": (SEGMENT, tactics(SEGMENT.K, 80)[2], 80),
}


def ready_kernels(capability: int) -> Iterator[tuple[str, Case, Kernel, Kernel]]:
    """Name, case and the two kernels of everything that a GPU of this compute capability runs."""
    document = read_json(FILE)
    for name, (case, _, oldest) in READY.items():
        if capability >= oldest:
            first, second = (Kernel(**fields) for fields in document[name])
            yield name, case, first, second


def hash_of_sources() -> str:
    """Of the files that the kernels are compiled from, so that a change without new kernels is noticed."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def origin() -> str:
    """The sources and the release of Triton that compile kernels here."""
    return f"{hash_of_sources()}, Triton {version('triton')}"


def ring_kernel(widest: int, dtype: Type, ring_dtype: Type) -> Kernel:
    """The kernel of the node for `cuda`, for heads of at most this width, and for these types."""
    lanes = RING_WIDTHS[widest]
    tactic = Tactic(kernel="ring_attention", block_t=1, block_j=lanes, warps=4, stages=1)
    fixed: dict[str, int | None] = {"BLOCK_J": lanes, "BLOCK_K": widest}
    return compile_kernel(tactic, fixed, compute_capability=75, dtype=dtype, ring_dtype=ring_dtype)


def ring_source() -> str:
    """The C++ header with the kernels of the node."""
    entries = []
    for widest, types in itertools.product(RING_WIDTHS, RING_TYPES):
        kernel = ring_kernel(widest, *types)
        halves = [int(dtype == "float16") for dtype in types]
        numbers = [widest, *halves, RING_WIDTHS[widest], kernel.threads, kernel.shared_bytes]
        lines = [line.strip() for line in re.sub("//.*", "", kernel.ptx).splitlines()]
        text = "\n".join(filter(None, lines))
        entries.append(f"    {{{', '.join(map(str, numbers))}, {json_text(text)}}},\n")
    return f"// {ORIGIN}: {origin()}\n{_HEADER}" + "".join(entries) + "};\n"


_HEADER = """// Written by `python -m xl_export.tensorrt.kernels.ready`.
#pragma once

/// A kernel `ring_attention`. widest: of its heads. halves, ring_halves: whether its tensors, and the ring,
/// are of halves. block_j: keys that are read together.
struct RingKernel {
  int widest;
  bool halves, ring_halves;
  int block_j, threads, shared_bytes;
  const char* ptx;
};

constexpr RingKernel RING_KERNELS[] = {
"""


def ready_document() -> dict[str, Any]:
    """The kernels of `devices --try`, as FILE has them."""
    document: dict[str, Any] = {ORIGIN: origin()}
    for name, (case, tactic, oldest) in READY.items():
        kernels = compile_pair(
            [array.shape for array in case.inputs().values()],
            case.attributes,
            case.mem_len,
            tactic=tactic,
            join=JOINS[0],
            compute_capability=oldest,
            dtype=case.dtype,
        )
        document[name] = [dataclasses.asdict(kernel) for kernel in kernels]
    return document


if __name__ == "__main__":
    write_json(FILE, ready_document())
    RING_FILE.write_text(ring_source())
