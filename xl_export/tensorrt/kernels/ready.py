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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtimes.base.files import read_json, write_json
from runtimes.base.records import json_text
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import (
    JOINS,
    PROGRAMS_EACH,
    REGISTERS,
    Kernel,
    Tactic,
    Type,
    aligned,
    compile_kernel,
    tactics,
)
from xl_export.tensorrt.kernels.driver import compile_pair

FILE = Path(__file__).with_name("ready.json")
# What the C++ operator includes (`operator.hpp` next to it).
RING_FILE = Path(__file__).parents[3] / "runtimes" / "sessions" / "ort_gpu" / "kernels.hpp"
# What the kernels are compiled from. Only a nightly test notices that `compile.py` compiles them otherwise.
SOURCES = ("common", "segment", "skew", "token", "join", "ring", "product")
ORIGIN = "compiled from"  # the entry of FILE with the hash, and the release of Triton
# The widest heads of a kernel `ring_attention`, and its lanes.
RING_WIDTHS = {64: 32, 128: 16}
# Of the tensors, and of the ring and the position table.
RING_TYPES: tuple[tuple[Type, Type], ...] = (
    ("float32", "float32"),
    ("float32", "float16"),
    ("float16", "float16"),
)
# The most rows of a kernel of products, its columns for each program, and how many numbers of a row it reads
# together.
PRODUCT_ROWS = {1: (4, 512), 8: (4, 256)}
PRODUCT_TYPES: tuple[Type, ...] = ("float32", "float16")
END_COLUMNS = 512  # of `product_end`, that are computed together
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


@dataclass(frozen=True, kw_only=True)
class RingTactic:
    """A kernel of the node for `cuda`: its tiles, its widest heads, the types of its tensors and of its ring,
    and the oldest compute capability that runs it.
    """

    tactic: Tactic
    widest: int
    types: tuple[Type, Type]
    oldest: int

    @property
    def programs(self) -> int:
        """How many programs a multiprocessor's registers hold."""
        threads = 32 * self.tactic.warps
        return PROGRAMS_EACH if self.tactic.block_t == 1 else REGISTERS // (256 * threads)

    def compiled(self) -> Kernel:
        tiles = {"BLOCK_J": self.tactic.block_j, "BLOCK_K": self.widest}
        fixed: dict[str, int | None] = dict(tiles)
        if self.tactic.block_t > 1:
            fixed["BLOCK_T"] = self.tactic.block_t
        dtype, ring_dtype = self.types
        capability = self.oldest
        return compile_kernel(
            self.tactic, fixed, compute_capability=capability, dtype=dtype, ring_dtype=ring_dtype
        )


def _tokens(widest: int, types: tuple[Type, Type]) -> RingTactic:
    lanes = RING_WIDTHS[widest]
    tactic = Tactic(kernel="ring_attention", block_t=1, block_j=lanes, warps=4, stages=1)
    return RingTactic(tactic=tactic, widest=widest, types=types, oldest=75)


def _segments(widest: int, dtype: Type, block_t: int, block_j: int) -> RingTactic:
    warps = block_t // 16
    tactic = Tactic(kernel="ring_segment_attention", block_t=block_t, block_j=block_j, warps=warps, stages=2)
    return RingTactic(tactic=tactic, widest=widest, types=(dtype, dtype), oldest=80)


# Narrower heads come first. Segments in tiles are of the largest tiles without spills in the loop over keys:
# none are of wide heads in float32, nor of floats over a ring of halves.
RING_TACTICS = (
    *(_tokens(widest, types) for widest, types in itertools.product(RING_WIDTHS, RING_TYPES)),
    _segments(64, "float16", 64, 32),
    _segments(128, "float16", 64, 32),
    _segments(64, "float32", 32, 16),
)


def product_kernel(rows: int, dtype: Type) -> Kernel:
    """The kernel for products of at most this many rows."""
    columns, depth = PRODUCT_ROWS[rows]
    # Each thread reads 16 bytes of weights at a time.
    warps = 8 if rows > 1 and dtype == "float32" else 4
    tactic = Tactic(kernel="product_of_few_rows", block_t=rows, block_j=columns, warps=warps, stages=1)
    fixed: dict[str, int | None] = {"ROWS": rows, "BLOCK_N": columns, "BLOCK_K": depth}
    return compile_kernel(tactic, fixed, compute_capability=75, dtype=dtype)


def end_kernel(dtype: Type) -> Kernel:
    """The kernel for what comes behind a product of more rows."""
    tactic = Tactic(kernel="product_end", block_t=1, block_j=END_COLUMNS, warps=4, stages=1)
    return compile_kernel(tactic, {"BLOCK": END_COLUMNS}, compute_capability=75, dtype=dtype)


def ring_source() -> str:
    """The C++ header with the kernels of the nodes."""
    entries = []
    for each in RING_TACTICS:
        kernel = each.compiled()
        halves = [int(dtype == "float16") for dtype in each.types]
        numbers = [each.widest, *halves, aligned(each.tactic, each.types[0]), each.oldest]
        numbers += [kernel.block_t, each.tactic.block_j, each.programs, kernel.threads, kernel.shared_bytes]
        entries.append(_entry(numbers, kernel))
    products = []
    for dtype in PRODUCT_TYPES:
        kernels = [(rows, PRODUCT_ROWS[rows][0], product_kernel(rows, dtype)) for rows in PRODUCT_ROWS]
        for rows, columns, kernel in (*kernels, (0, 0, end_kernel(dtype))):
            numbers = [int(dtype == "float16"), rows, columns, kernel.threads, kernel.shared_bytes]
            products.append(_entry(numbers, kernel))
    parts = [f"// {ORIGIN}: {origin()}\n{_HEADER}", *entries, _PRODUCTS, *products]
    return "".join(parts) + "};\n"


def _entry(numbers: list[int], kernel: Kernel) -> str:
    """A kernel in an array of C++, its text without comments."""
    lines = [line.strip() for line in re.sub("//.*", "", kernel.ptx).splitlines()]
    text = "\n".join(filter(None, lines))
    return f'    {{"{kernel.name}", {", ".join(map(str, numbers))}, {json_text(text)}}},\n'


_HEADER = """// Written by `python -m xl_export.tensorrt.kernels.ready`.
#pragma once

/// A kernel of the node. widest: of its heads. halves, ring_halves: whether its tensors are of halves, and
/// the ring and the position table. multiple: what the head width and the columns are multiples of. oldest:
/// compute capability, 80 for 8.0. block_t, block_j: queries and keys that a program reads together.
/// programs: for which a multiprocessor has registers.
struct RingKernel {
  const char* name;
  int widest;
  bool halves, ring_halves;
  int multiple, oldest, block_t, block_j, programs, threads, shared_bytes;
  const char* ptx;
};

constexpr RingKernel RING_KERNELS[] = {
"""

_PRODUCTS = """};

/// A kernel of products. halves: whether its tensors are of them. rows: the most that it multiplies; 0 for
/// `product_end`. columns: of the result, that a program computes.
struct ProductKernel {
  const char* name;
  bool halves;
  int rows, columns, threads, shared_bytes;
  const char* ptx;
};

constexpr ProductKernel PRODUCT_KERNELS[] = {
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
