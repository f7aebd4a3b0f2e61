"""The kernels compile for every GPU, without one: to PTX that takes TensorRT's arguments alone, and on to
machine code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtimes import UserError
from runtimes.contract.tensors import Form
from xl_export.tensorrt.kernels import compile as compile_module
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.compile import (
    JOINS,
    PTX_VERSIONS,
    TENSOR_MEMORY,
    Sizes,
    Tactic,
    Type,
    compile_kernel,
    constants,
    join_constants,
    tactics,
)
from xl_export.tensorrt.kernels.driver import parameter_kinds
from xl_export.tensorrt.kernels.resources import (
    Resources,
    all_kernels,
    compiled_for,
    innermost_loop,
    resources,
    table_line,
)
from xl_export.tensorrt.operator import SIGNATURES, Attributes

triton = pytest.importorskip("triton")

TABLE = Path(__file__).with_name("resources.md")
# Bytes that CUDA gives a block that does not ask for more, and TensorRT's launches do not.
SHARED_MEMORY = 49_152
ATTRIBUTES = Attributes(full_mask=0, nearest=0, initial_masked=1, persistent=0)
BASE = Sizes(
    heads=8, head_dim=64, table_heads=8, table_rows=1601, bias_heads=1, bias_rows=1, persistent_rows=1
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def rows_of_the_table() -> list[str]:
    return [line for line in TABLE.read_text().splitlines() if "_attention" in line]


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
def test_a_kernel_takes_what_the_table_says(
    capability: int, tactic: Tactic, head_dim: int, form: Form
) -> None:
    """PTX for the GPU, for old drivers, without a path of this machine, and with TensorRT's arguments alone;
    then the machine code. `python -m xl_export.tensorrt.kernels.resources` writes the table anew.
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
        assert found.barriers <= {(128, 64): 4, (32, 64): 3}.get((tactic.block_t, tactic.block_j), 2)
        assert found.spilled <= (16 if head_dim == 64 else 128)
    else:
        assert "ld.global.v4" in kernel.ptx  # 16 bytes for each thread at a time
        assert (found.barriers, found.spilled) == (0, 0)
        assert found.registers <= 128  # four programs of four warps on each multiprocessor
    if triton.__version__ in TABLE.read_text():
        assert table_line(capability, tactic, head_dim, form, found) in rows_of_the_table()


def test_the_table_has_a_row_for_every_kernel() -> None:
    nothing = Resources(registers=0, spilled=0, shared_bytes=0, barriers=0, shuffles=0)
    expected = [table_line(*row, nothing).rsplit("|", 6)[0] for row in all_kernels()]
    assert [row.rsplit("|", 6)[0] for row in rows_of_the_table()] == expected


def test_a_loop_in_a_loop_is_found() -> None:
    assembly = """
.L_x_1:
    IADD3 R1
    BAR.SYNC.DEFER_BLOCKING 0x0
.L_x_2:
    HMMA.16816.F32
    BAR.SYNC.DEFER_BLOCKING 0x0
    SHFL.IDX PT
    @P0 BRA `(.L_x_2) ;
    @P1 BRA `(.L_x_1) ;
    EXIT
.L_x_3:
    BRA `(.L_x_3) ;
"""
    loop = innermost_loop(assembly)
    assert "HMMA" in loop
    assert loop.count("BAR.") == loop.count("SHFL.") == 1
    assert innermost_loop("    EXIT") == ""


@pytest.mark.parametrize("tactic", JOINS, ids=lambda tactic: str(tactic.block_t))
@pytest.mark.parametrize(
    "capability", [75, *(pytest.param(c, marks=pytest.mark.slow) for c in (87, 90, 120))]
)
def test_the_joining_kernel_compiles(capability: int, tactic: Tactic) -> None:
    kernel = compile_kernel(tactic, join_constants(tactic, 64), compute_capability=capability)
    assert parameter_kinds(kernel) == ["u64"] * 3 + ["u32", "u32"] + ["u64"]
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


@pytest.mark.slow
def test_a_tile_beyond_shared_memory_is_refused() -> None:
    """Tiles of keys that are loaded long before they are used all take shared memory."""
    (tile,) = (tactic for tactic in tactics(64, 80) if (tactic.block_t, tactic.block_j) == (16, 32))
    with pytest.raises(UserError, match=rf"needs \d+ bytes .* every GPU has {SHARED_MEMORY};"):
        compiled_for(80, dataclasses.replace(tile, stages=8), 64)


def test_sizes_come_from_the_shapes_of_the_inputs() -> None:
    case = CASES["persistent"]
    shapes = [list(array.shape) for array in case.inputs().values()]
    shapes[0][2] = shapes[1][2] = -1  # as TensorRT writes what is dynamic
    assert Sizes.of(shapes) == Sizes(
        heads=2, head_dim=16, table_heads=2, table_rows=21, bias_heads=2, bias_rows=21, persistent_rows=5
    )


@pytest.mark.parametrize(
    ("change", "compute_capability", "message"),
    [
        ({"head_dim": 160}, 86, "heads are 160 wide .* --attention native"),
        ({}, 70, "compute capability 70, expected one of 75, "),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    change: dict[str, int], compute_capability: int, message: str
) -> None:
    sizes = Sizes(**{**BASE.__dict__, **change})
    with pytest.raises(UserError, match=message):
        compile_kernel(
            tactics(64, 75)[0],
            constants(tactics(64, 75)[0], sizes, ATTRIBUTES),
            compute_capability=compute_capability,
        )


@pytest.mark.parametrize(
    ("dtype", "mend"),
    [
        ("float32", "export with --target tensorrt, which is float16"),
        ("float16", "build with --attention native"),
    ],
)
def test_a_kernel_beyond_shared_memory_is_refused(
    dtype: Type, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is one that the user has not followed yet: only a graph in float32 can become float16."""
    monkeypatch.setattr(compile_module, "SHARED_BYTES", 16)
    message = rf"needs \d+ bytes of shared memory in {dtype}, and every GPU has 16; {mend}\.$"
    with pytest.raises(UserError, match=message):
        compile_kernel(JOINS[0], join_constants(JOINS[0], 64), compute_capability=75, dtype=dtype)
