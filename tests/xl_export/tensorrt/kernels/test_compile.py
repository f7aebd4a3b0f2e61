"""The kernels compile for every GPU, without one: to PTX that takes TensorRT's arguments alone, and on to
machine code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from runtimes import UserError
from runtimes.contract.tensors import Form
from tests.xl_export.tensorrt.kernels.resources import compiled_for, resources
from xl_export.tensorrt.kernels.compile import (
    JOINS,
    PTX_VERSIONS,
    TENSOR_MEMORY,
    Sizes,
    Tactic,
    compile_kernel,
    constants,
    join_constants,
    parts,
    scratch_rows,
    tactics,
)
from xl_export.tensorrt.kernels.driver import parameter_kinds
from xl_export.tensorrt.operator import SIGNATURES, Attributes

triton = pytest.importorskip("triton")

# Bytes that CUDA gives a block that does not ask for more, and TensorRT's launches do not.
SHARED_MEMORY = 49_152


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def all_kernels() -> Iterator[tuple[int, Tactic, int, Form]]:
    """GPU, tactic, head width and form of every kernel: of heads 128 wide only the largest tile."""
    forms: tuple[Form, ...] = ("shift", "ring")
    for form in forms:
        for capability in PTX_VERSIONS:
            for tactic in tactics(64, capability):
                yield capability, tactic, 64, form
            yield capability, tactics(128, capability)[-1], 128, form


# The GPU, the tile and the form of memory of the rows that run by default; their heads are 64 wide.
CHEAP = {(120, 16, 32, "ring")}


def marked(row: tuple[int, Tactic, int, Form]) -> Any:
    """The row as a test; compiling takes seconds, so most are slow."""
    capability, tactic, head_dim, form = row
    tiles = (tactic.block_t, tactic.block_j)
    cheap = head_dim == 64 and (capability, *tiles, form) in CHEAP
    name = f"{capability}-{tactic.block_t}x{tactic.block_j}-{head_dim}-{form}"
    return pytest.param(*row, marks=() if cheap else pytest.mark.slow, id=name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("capability", "tactic", "head_dim", "form"), [marked(row) for row in all_kernels()])
def test_a_kernel_fits_its_gpu(capability: int, tactic: Tactic, head_dim: int, form: Form) -> None:
    """PTX for the GPU, for old drivers, without a path of this machine, and with TensorRT's arguments alone;
    then the machine code.
    """
    kernel = compiled_for(capability, tactic, head_dim, form)
    version = re.search(r"\.version (\d+)\.(\d+)", kernel.ptx)
    assert version is not None
    assert int(version[1] + version[2]) == PTX_VERSIONS[capability]
    assert capability >= 100 or PTX_VERSIONS[capability] == 80
    assert not re.search(r"\.file|\.loc\b|\.debug|\.py\b|/", kernel.ptx.replace("//", ""))
    inputs = SIGNATURES[form == "ring"].inputs
    assert parameter_kinds(kernel) == ["u64"] * len(inputs) + ["u32", "u32"] + ["u64", "u64"]
    assert f".reqntid {kernel.threads}" in kernel.ptx
    found = resources(kernel)
    assert found.shared_bytes <= SHARED_MEMORY
    if tactic.kernel == "segment_attention":
        assert re.search(r"wgmma\.mma_async|mma\.sync", kernel.ptx)
        # Fewer than one means that no loop was found.
        assert 1 <= found.barriers <= {(128, 64): 4, (32, 64): 3}.get((tactic.block_t, tactic.block_j), 2)
        assert found.spilled <= (16 if head_dim == 64 else 128)
    else:
        assert "ld.global.v4" in kernel.ptx  # 16 bytes for each thread at a time
        assert (found.barriers, found.spilled) == (0, 0)
        assert found.registers <= 128  # four programs of four warps on each multiprocessor


@pytest.mark.parametrize("tactic", JOINS, ids=lambda tactic: str(tactic.block_t))
@pytest.mark.parametrize(
    "capability", [75, *(pytest.param(c, marks=pytest.mark.slow) for c in (87, 90, 120))]
)
def test_the_joining_kernel_compiles(capability: int, tactic: Tactic) -> None:
    kernel = compile_kernel(tactic, join_constants(tactic, 64), compute_capability=capability)
    assert parameter_kinds(kernel) == ["u64"] * 4 + ["u32", "u32"] + ["u64"]
    assert resources(kernel).spilled == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "head_dim", "spilled", "barriers"),
    [(87, 41, 512, 6), (87, 128, 384, 2), (110, 41, 128, 18), (110, 128, 128, 2)],  # the two Jetsons
)
def test_every_tactic_fits_a_small_gpu(capability: int, head_dim: int, spilled: int, barriers: int) -> None:
    """A model with all at once that takes registers: a width that is odd or the widest, the full mask, biases
    and persistent vectors. Some bytes are spilled then, and rows of odd width go through shared memory.
    """
    sizes = Sizes(
        heads=2,
        head_dim=head_dim,
        table_heads=1,
        table_rows=70,
        bias_heads=2,
        bias_rows=70,
        persistent_rows=40,
    )
    attributes = Attributes(full_mask=1, nearest=1, initial_masked=0, persistent=40)
    for tactic in tactics(head_dim, capability):
        kernel = compile_kernel(tactic, constants(tactic, sizes, attributes), compute_capability=capability)
        found = resources(kernel)
        assert found.shared_bytes <= SHARED_MEMORY, tactic
        assert found.spilled <= spilled, tactic
        assert found.barriers <= barriers, tactic


def test_segments_have_a_kernel_for_tensor_cores() -> None:
    for compute_capability, dtype, expected in ((75, "float16", False), (80, "float16", True)):
        kernels = {tactic.kernel for tactic in tactics(64, compute_capability, dtype)}
        assert ("segment_attention" in kernels) == expected
    assert {tactic.block_t for tactic in tactics(64, 90, "float32")} == {1}


@pytest.mark.parametrize("capability", TENSOR_MEMORY)
def test_gpus_with_tensor_memory_get_the_tiles_that_fit_them(capability: int) -> None:
    """Larger ones need more shared memory than a block has; the rows of the table are those that fit."""
    assert [(t.block_t, t.block_j) for t in tactics(64, capability)[2:]] == [(16, 32), (32, 32), (32, 64)]
    assert [(t.block_t, t.block_j) for t in tactics(41, capability)[2:]] == [(16, 32), (32, 32)]
    assert [(t.block_t, t.block_j) for t in tactics(128, capability)[2:]] == [(16, 32)]


def test_a_gpu_without_kernels_is_refused() -> None:
    with pytest.raises(UserError, match="compute capability 70, expected one of 75, "):
        compile_kernel(JOINS[0], join_constants(JOINS[0], 64), compute_capability=70)


@pytest.mark.parametrize(
    ("multiprocessors", "B", "T", "expected"),
    [
        (132, 1, 1, 26),  # one tile of keys each
        (132, 8, 1, 7),  # 448 programs in 528 places; 9 parts would need a second wave
        (132, 32, 1, 2),
        (132, 64, 1, 1),
        (132, 1, 2, 13),
        (132, 1, 128, 6),  # five tiles each
        (132, 8, 128, 2),  # 256 programs of 64 queries, or 128 of 128
        (132, 8, 512, 1),
        (16, 1, 1, 7),
        (16, 1, 128, 2),
        (16, 3, 33, 1),
    ],
)
def test_keys_are_divided_among_the_programs_that_run_at_once(
    multiprocessors: int, B: int, T: int, expected: int
) -> None:
    """Of a model with 8 heads and a memory of 1,600 tokens, on a large GPU and on a small one."""
    gpu = {"multiprocessors": multiprocessors}
    assert parts(B, 8, T, 1600 + T, **gpu) == expected
    for fewer in range(1, B + 1):  # scratch for a profile's largest shape is enough for every smaller one
        for shorter in range(1, T + 1):
            rows = scratch_rows(fewer, 8, shorter, **gpu)
            used = parts(fewer, 8, shorter, 1600 + shorter, **gpu) * fewer * 8 * shorter
            assert used <= rows <= scratch_rows(B, 8, T, **gpu)
