"""The kernels of `xl::RelativeAttention` as PTX for one GPU and one node's sizes, made without a GPU.

An engine carries this text and launches it with tensors and integers as its only arguments: see `kernel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtimes.base.errors import ConfigError
from xl_export.tensorrt.operator import INPUTS, Attributes

MAX_HEAD_DIM = 128
# Compute capability: the oldest PTX version that has it, since an older driver or TensorRT does not take the compiler's own.
PTX_VERSIONS = {75: 84, 80: 84, 86: 84, 87: 84, 89: 84, 90: 84, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}
GRANTED = 48 * 1024  # bytes of shared memory that a block gets on every GPU without being asked for more
PROGRAMS = 256  # about what it takes to keep the largest GPUs busy
QUERIES = 16  # to a program, for the count of programs: the smallest tile of `segment_attention`
Type = Literal["float16", "float32"]
_POINTERS = {"float16": "*fp16", "float32": "*fp32"}
_TYPES = {"first": "*i32", "mixed_out": "*fp32", "mixed": "*fp32", "level": "*fp32"} | dict.fromkeys(
    ("T", "J", "rows", "parts"), "i32"
)


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """One way to run the operator, right for every shape: which kernel, and its tiles of queries (block_t) and keys (block_j)."""

    kernel: Literal["segment_attention", "token_attention", "join_parts"]
    block_t: int
    block_j: int
    warps: int
    stages: int


def tactics(head_dim: int) -> tuple[Tactic, ...]:
    """The tactics among which a build chooses by time. None takes more shared memory than every GPU grants (48 KiB), and from
    compute capability 8.0 on none runs out of registers."""
    wide = head_dim > 64
    return (
        Tactic(kernel="token_attention", block_t=1, block_j=32 if wide else 64, warps=4, stages=1),
        Tactic(kernel="token_attention", block_t=1, block_j=64 if wide else 128, warps=8, stages=1),
        Tactic(kernel="segment_attention", block_t=16, block_j=32, warps=4, stages=2),
        Tactic(kernel="segment_attention", block_t=16, block_j=64, warps=4, stages=1 if wide else 2),
        *(() if wide else (Tactic(kernel="segment_attention", block_t=32, block_j=64, warps=4, stages=2),)),
    )


JOINS = (
    Tactic(kernel="join_parts", block_t=1, block_j=32, warps=4, stages=1),  # few queries in many parts
    Tactic(kernel="join_parts", block_t=16, block_j=1, warps=4, stages=1),  # many queries in few
)


def programs(B: Any, H: Any, T: Any) -> Any:
    """Programs that attend to undivided keys; of numbers, or of TensorRT's expressions."""
    return B * H * ((T + (QUERIES - 1)) // QUERIES)


def parts(undivided: Any, *, number: Callable[[int], Any] = int) -> Any:
    """Parts that the keys are divided into, so that there are about PROGRAMS programs: 1 where there are as many undivided."""
    return number(PROGRAMS - 1) // undivided + 1


def scratch_rows(undivided: Any) -> Any:
    """Rows of `mixed` and `level` that are enough for any shape with no more undivided programs.

    At most undivided + PROGRAMS - 1 programs write QUERIES rows each. It grows with batch and T, unlike the parts themselves, so
    that what TensorRT sets aside for a profile's largest shape is enough for all.
    """
    return (undivided + (PROGRAMS - 1)) * QUERIES


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of a node's shapes a kernel has compiled in: all but batch, T and J."""

    heads: int
    head_dim: int
    table_heads: int
    table_rows: int
    bias_heads: int
    bias_rows: int
    persistent_rows: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]]) -> Sizes:
        """From the shapes of the operator's inputs, in order; what is dynamic in them is not looked at."""
        shape = dict(zip(INPUTS, shapes, strict=True))
        heads, _, head_dim = shape["u"]
        (table_heads, table_rows, _), (bias_heads, bias_rows) = shape["position_table"], shape["bias_table"]
        return cls(
            heads=heads, head_dim=head_dim, table_heads=table_heads, table_rows=table_rows, bias_heads=bias_heads,
            bias_rows=bias_rows, persistent_rows=shape["persistent_key"][1],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel: its entry `name` in `ptx`, to be launched with `threads` per block and `shared_bytes` of dynamic shared
    memory, on a grid of (B·H, ceil(T / block_t), parts) blocks, or of ceil(B·H·T / block_t) where it joins."""

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    block_t: int


def constants(tactic: Tactic, sizes: Sizes, attributes: Attributes) -> dict[str, int]:
    """The compile-time arguments of the kernels that attend; raises ConfigError where the heads are too wide."""
    if sizes.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"heads are {sizes.head_dim} wide and the kernel takes {MAX_HEAD_DIM} at most; export with --attention native."
        )
    return {
        "H": sizes.heads, "K": sizes.head_dim, "R": sizes.table_rows, "BIAS_R": sizes.bias_rows, "N": sizes.persistent_rows,
        "TABLE_PER_HEAD": int(sizes.table_heads > 1), "BIAS_PER_HEAD": int(sizes.bias_heads > 1),
        "FULL_MASK": attributes.full_mask, "NEAREST": attributes.nearest, "INITIAL_MASKED": attributes.initial_masked,
        "PERSISTENT": attributes.persistent, "BLOCK_T": tactic.block_t, "BLOCK_J": tactic.block_j,
        "BLOCK_K": _block_k(sizes.head_dim),
    }  # fmt: skip


def join_constants(tactic: Tactic, head_dim: int) -> dict[str, int]:
    """The compile-time arguments of `join_parts`."""
    return {
        "K": head_dim,
        "BLOCK_T": tactic.block_t,
        "BLOCK_J": tactic.block_j,
        "BLOCK_K": _block_k(head_dim),
    }


def _block_k(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def compile_kernel(
    tactic: Tactic, fixed: dict[str, int], *, compute_capability: int, dtype: Type = "float16"
) -> Kernel:
    """The kernel of one tactic, with its compile-time arguments, for a GPU of this compute capability (86 for 8.6).

    Raises ConfigError where the compiler does not know the GPU, or the kernel takes more shared memory than every GPU grants.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from xl_export.tensorrt import triton_kernel

    if compute_capability not in PTX_VERSIONS:
        known = ", ".join(map(str, PTX_VERSIONS))
        raise ConfigError(
            f"the kernel is not compiled for compute capability {compute_capability}; expected one of {known}."
        )
    function = getattr(triton_kernel, tactic.kernel)
    signature, aligned = _signature(function.arg_names, fixed, _POINTERS[dtype])
    source = ASTSource(
        fn=function, signature=signature, constexprs={(function.arg_names.index(name),): x for name, x in fixed.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )  # fmt: skip
    options = {
        "num_warps": tactic.warps, "num_stages": tactic.stages, "enable_fp_fusion": True,
        "ptx_version": PTX_VERSIONS[compute_capability],
    }  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
    if compiled.metadata.shared > GRANTED:
        raise ConfigError(
            f"{tactic} takes {compiled.metadata.shared} bytes of shared memory in {dtype}, more than the {GRANTED} that every "
            "GPU grants; export with --target tensorrt, which is float16."
        )
    return Kernel(
        name=tactic.kernel, ptx=_without_hidden(compiled.asm["ptx"], tactic.kernel, arguments=len(signature) - len(fixed)),
        threads=32 * tactic.warps, shared_bytes=compiled.metadata.shared, block_t=tactic.block_t,
    )  # fmt: skip


def _signature(names: list[str], fixed: dict[str, int], pointer: str) -> tuple[dict[str, str], list[int]]:
    """Types of a kernel's arguments, and which of them are pointers: TensorRT aligns tensors to 256 bytes."""
    types = _TYPES | dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, pointer) for name in names}
    return signature, [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]


def _without_hidden(ptx: str, name: str, *, arguments: int) -> str:
    """The PTX without the scratch pointers that Triton appends to the arguments: TensorRT would not pass them."""
    hidden = re.compile(rf",\s*\.param \.u64 [^,()]*\b{name}_param_(\d+)\s*(?=\n\))")
    while (last := hidden.search(ptx)) and int(last[1]) >= arguments:
        ptx = ptx[: last.start()] + ptx[last.end() :]
        assert f"{name}_param_{last[1]}" not in ptx, (
            f"{name} uses scratch memory, which TensorRT does not give"
        )
    assert f"{name}_param_{arguments - 1}" in ptx and f"{name}_param_{arguments}" not in ptx, (
        "unexpected arguments"
    )
    return ptx
