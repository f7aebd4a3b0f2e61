"""The Triton kernels of `xl_export::RelativeAttention` as PTX for one GPU and one node's sizes, compiled
without a GPU.

An engine carries this text, and launches it with tensors and integers as its only arguments: see
`segment.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from runtimes.base.errors import ConfigError
from xl_export.tensorrt.operator import INPUTS, RING_INPUTS, Attributes

MAX_HEAD_DIM = 128
# For each compute capability, the PTX version that is written for it: the oldest that has the GPU and all
# that the compiler uses, since a driver refuses PTX that is newer than itself; for 8.0 CUDA 12.0 is enough.
PTX_VERSIONS = {75: 80, 80: 80, 86: 80, 87: 80, 89: 80, 90: 80, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}
SHARED_BYTES = 48 * 1024  # shared memory that a block has on every GPU without asking for more
# Compute capabilities whose tensor cores can keep results in a memory of their own (tcgen05). Triton uses it
# for tiles of 64 queries and more. The relative shift is made for results in registers. Results from that
# memory go through shared memory, which is then too small: 64 x 64 needs 67,632 bytes.
TENSOR_MEMORY = (100, 103, 110)
PROGRAMS_EACH = 4  # that a multiprocessor's registers hold: of `token_attention`, and of `ring_attention`
TILES_EACH = 2  # the same of tiles of QUERIES: two programs of `segment_attention`, or one of twice the tile
REGISTERS = 65536  # of a multiprocessor
QUERIES = 64  # of one program when programs are counted: the tile of `segment_attention` for long segments
KEYS = 64  # of one tile when the tiles of keys are counted
# Tiles of keys that a part of a segment has at least. Its partial answers are written in float32 and read
# again, which is as many bytes as two tiles.
LEAST_TILES = 4
Type = Literal["float16", "float32"]
_POINTERS = {"float16": "*fp16", "float32": "*fp32"}
# Multiples of 4, so that four floats are loaded at once; of `ring_segment_attention` multiples of 16 bytes.
_ALIGNED = ("K", "query_pitch", "query_at", "context_pitch", "key_at", "value_at")
_TYPES = (
    {"first": "*i32", "slot": "*i32", "counters": "*i32", "positions": "*i64"}
    | dict.fromkeys(("T", "J", "rows", "parts"), "i32")
    | dict.fromkeys(("mixed_out", "mixed", "level"), "*fp32")
    | dict.fromkeys((*_ALIGNED, "H", "S", "M", "R", "BIAS_R", "N", "full_mask", "nearest", "masked"), "i32")
    | dict.fromkeys(("has_bias", "has_residual", "normed", "residual_normed", "relu"), "i32")
    | {"epsilon": "fp32"}
)


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """One way to run the operator, correct for every shape: a kernel, its tiles of queries (block_t) and keys
    (block_j).
    """

    kernel: Literal[
        "segment_attention",
        "token_attention",
        "join_parts",
        "ring_attention",
        "ring_segment_attention",
        "product_of_few_rows",
        "product_end",
    ]
    block_t: int
    block_j: int
    warps: int
    stages: int


def tactics(head_dim: int, compute_capability: int, dtype: Type = "float16") -> tuple[Tactic, ...]:
    """The tactics that a build chooses from by time; each is correct for every shape.

    Each fits into the shared memory of every GPU, and into its registers. A tile of segments has 16 queries
    for each warp (`segment_attention`). That kernel is for tensor cores, which Triton uses for float16 and
    from compute capability 8.0 on: otherwise segments are computed as single tokens are. For TENSOR_MEMORY
    the tiles have at most 32 queries, and 16 if heads are wide: 32 would spill 328 bytes a thread. Odd widths
    do not use 32 x 64 there: their rows are not aligned for asynchronous copies, and it spills 540.
    """
    wide = head_dim > 64
    tokens = (
        Tactic(kernel="token_attention", block_t=1, block_j=32 if wide else 64, warps=4, stages=1),
        Tactic(kernel="token_attention", block_t=1, block_j=64 if wide else 128, warps=8, stages=1),
    )
    if compute_capability < 80 or dtype != "float16":
        return tokens
    tiles: tuple[tuple[int, int], ...]
    if compute_capability in TENSOR_MEMORY:
        tiles = ((16, 32),) if wide else ((16, 32), (32, 32), (32, 64))[: 2 if head_dim % 2 else 3]
    else:
        tiles = ((16, 32), (64, 32)) if wide else ((16, 32), (64, 64), (128, 64))
    return tokens + tuple(
        Tactic(kernel="segment_attention", block_t=block_t, block_j=block_j, warps=block_t // 16, stages=2)
        for block_t, block_j in tiles
    )


JOINS = (
    Tactic(kernel="join_parts", block_t=1, block_j=32, warps=4, stages=1),  # few queries in many parts
    Tactic(kernel="join_parts", block_t=16, block_j=1, warps=4, stages=1),  # many queries in few
)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How sizes are computed with: as integers, or as TensorRT's expressions."""

    number: Callable[[int], Any] = int
    """Makes a constant."""
    least: Callable[[Any, Any], Any] = min
    most: Callable[[Any, Any], Any] = max


INTEGERS = Arithmetic()


def programs(B: Any, H: Any, T: Any) -> Any:
    """How many programs attend to keys that are not divided."""
    return B * H * ((T + (QUERIES - 1)) // QUERIES)


def parts(B: Any, H: Any, T: Any, J: Any, *, multiprocessors: int, by: Arithmetic = INTEGERS) -> Any:
    """How many parts the keys are divided into, so that all multiprocessors of a GPU have work.

    The programs of all parts run at once, since a few more would wait for all others. A part of a segment has
    at least LEAST_TILES, and a part of a token one tile. All but the last have the same number, so none is
    empty. The parts depend only on the shapes and the GPU, so the same step has the same bits every time.
    """
    # PROGRAMS_EACH have one query each. So few queries are computed by `token_attention`.
    places = by.most(by.number(PROGRAMS_EACH) // T, TILES_EACH) * multiprocessors
    last = (J - 1) // KEYS  # tile of keys
    most = by.least(places // programs(B, H, T), (last + 1) // by.least(T, LEAST_TILES))
    each = last // by.most(most, 1) + 1
    return last // each + 1


def scratch_rows(B: Any, H: Any, T: Any, *, multiprocessors: int, by: Arithmetic = INTEGERS) -> Any:
    """How many rows `mixed` and `level` need for any shape with at most this batch and segment.

    A program writes min(T, QUERIES) rows. If keys are divided, there are at most as many programs as run at
    once. The bound grows with batch and T, which the number of parts does not. So the memory that TensorRT
    reserves for a profile's largest shape is enough for all of its shapes.
    """
    tiles = by.most(programs(B, H, T), TILES_EACH * multiprocessors)
    return by.most(tiles * by.least(T, QUERIES), PROGRAMS_EACH * multiprocessors)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a node that are compiled into a kernel: all of them except batch, T and J."""

    heads: int
    head_dim: int
    table_heads: int
    table_rows: int
    bias_heads: int
    bias_rows: int
    persistent_rows: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]]) -> Sizes:
        """From the shapes of the operator's inputs, in order; dynamic sizes in them are not read."""
        shape = dict(zip(RING_INPUTS if len(shapes) > len(INPUTS) else INPUTS, shapes, strict=True))
        heads, _, head_dim = shape["u"]
        (table_heads, table_rows, _), (bias_heads, bias_rows) = shape["position_table"], shape["bias_table"]
        return cls(
            heads=heads,
            head_dim=head_dim,
            table_heads=table_heads,
            table_rows=table_rows,
            bias_heads=bias_heads,
            bias_rows=bias_rows,
            persistent_rows=shape["persistent_key"][1],
        )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel: the entry `name` in `ptx`.

    It is launched with `threads` per block and `shared_bytes` of dynamic shared memory. The grid has
    (B·H, ceil(T / block_t), parts) blocks, or ceil(B·H·T / block_t) for the kernel that joins the parts.
    """

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    block_t: int


def constants(
    tactic: Tactic, sizes: Sizes, attributes: Attributes, mem_len: int | None = None
) -> dict[str, int | None]:
    """The compile-time arguments of the two attention kernels.

    mem_len: of the operator over a ring; None without a ring, and then the kernel has no argument `slot`.
    """
    without_slot = {"slot": None} if mem_len is None else {}
    return without_slot | {
        "H": sizes.heads,
        "K": sizes.head_dim,
        "R": sizes.table_rows,
        "BIAS_R": sizes.bias_rows,
        "N": sizes.persistent_rows,
        "TABLE_PER_HEAD": int(sizes.table_heads > 1),
        "BIAS_PER_HEAD": int(sizes.bias_heads > 1),
        "FULL_MASK": attributes.full_mask,
        "NEAREST": attributes.nearest,
        "INITIAL_MASKED": attributes.initial_masked,
        "PERSISTENT": attributes.persistent,
        "MEM_LEN": mem_len,
        "BLOCK_T": tactic.block_t,
        "BLOCK_J": tactic.block_j,
        "BLOCK_K": _block_k(sizes.head_dim),
    }


def join_constants(tactic: Tactic, head_dim: int) -> dict[str, int | None]:
    """The compile-time arguments of `join_parts`."""
    return {
        "K": head_dim,
        "BLOCK_T": tactic.block_t,
        "BLOCK_J": tactic.block_j,
        "BLOCK_K": _block_k(head_dim),
    }


def _block_k(head_dim: int) -> int:
    """A head's width rounded up to a power of two of at least 16, which Triton's products need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def kernel_function(name: str) -> Any:
    """The Triton function of a tactic's `kernel`."""
    module = import_module(f"xl_export.tensorrt.kernels.{name.partition('_')[0]}")
    return getattr(module, name)


def compile_kernel(
    tactic: Tactic,
    fixed: dict[str, int | None],
    *,
    compute_capability: int,
    dtype: Type = "float16",
    ring_dtype: Type | None = None,
) -> Kernel:
    """The Triton kernel of one tactic, compiled for a GPU of this compute capability (86 for 8.6).

    fixed: its compile-time arguments. dtype: of its tensors. ring_dtype: of the ring and the position table
    of `ring_attention`, if it is another. Raises ConfigError if the GPU is not among PTX_VERSIONS.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if compute_capability not in PTX_VERSIONS:
        known = ", ".join(map(str, PTX_VERSIONS))
        raise ConfigError(
            f"the Triton kernels cannot be compiled for compute capability {compute_capability}, expected "
            f"one of {known}; build with --attention native."
        )
    function = kernel_function(tactic.kernel)
    pointers = _POINTERS[dtype], _POINTERS[ring_dtype or dtype]
    signature, divisors = _signature(function.arg_names, fixed, *pointers, aligned(tactic, dtype))
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(name),): x for name, x in fixed.items()},
        attrs={(at,): [["tt.divisibility", divisor]] for at, divisor in divisors.items()},
    )
    options = {
        "num_warps": tactic.warps,
        "num_stages": tactic.stages,
        "enable_fp_fusion": True,
        "ptx_version": PTX_VERSIONS[compute_capability],
    }
    if tactic.kernel == "ring_attention":
        options["maxnreg"] = REGISTERS // (PROGRAMS_EACH * 32 * tactic.warps)
    with triton.knobs.compilation.scope():
        # The lines of the source, by which PTX would name files of this machine.
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES, f"{tactic} needs {compiled.metadata.shared} bytes"
    arguments = len(signature) - len(fixed)
    return Kernel(
        name=tactic.kernel,
        ptx=_without_scratch_arguments(compiled.asm["ptx"], tactic.kernel, arguments=arguments),
        threads=32 * tactic.warps,
        shared_bytes=compiled.metadata.shared,
        block_t=tactic.block_t,
    )


def aligned(tactic: Tactic, dtype: Type) -> int:
    """What the head width and the columns are multiples of in a kernel of the node for `cuda`."""
    return 8 if tactic.kernel == "ring_segment_attention" and dtype == "float16" else 4


def _signature(
    names: list[str], fixed: dict[str, int | None], pointer: str, ring: str, multiple: int
) -> tuple[dict[str, str], dict[int, int]]:
    """The types of a kernel's arguments, and what pointers and some numbers are multiples of, by index.

    Pointers are multiples of 16 bytes, which allows loads of 16 bytes: TensorRT and ONNX Runtime align
    tensors to 256.
    """
    types = (
        _TYPES
        | dict.fromkeys(fixed, "constexpr")
        | dict.fromkeys(("ring_keys", "ring_values", "table"), ring)
    )
    signature = {name: types.get(name, pointer) for name in names}
    divisors = {at: 16 for at, kind in enumerate(signature.values()) if kind.startswith("*")}
    if "ring_keys" in signature:
        divisors |= {names.index(name): multiple for name in _ALIGNED}
    if "matrix" in signature:
        divisors[names.index("K")] = 8 if pointer == _POINTERS["float16"] else 4  # 16 bytes
    return signature, divisors


def _without_scratch_arguments(ptx: str, name: str, *, arguments: int) -> str:
    """The PTX without the pointers to scratch memory that Triton appends to the arguments: TensorRT passes
    none.

    Asserts that the kernel does not use them, and that the rest match the declared arguments in number.
    """
    hidden = re.compile(rf",\s*\.param \.u64 [^,()]*\b{name}_param_(\d+)\s*(?=\n\))")
    while (last := hidden.search(ptx)) and int(last[1]) >= arguments:
        ptx = ptx[: last.start()] + ptx[last.end() :]
        assert f"{name}_param_{last[1]}" not in ptx, (
            f"{name} uses scratch memory, which TensorRT does not provide"
        )
    assert f"{name}_param_{arguments - 1}" in ptx, f"{name} has fewer arguments than {arguments}"
    assert f"{name}_param_{arguments}" not in ptx, f"{name} has more arguments than {arguments}"
    return ptx
