"""The kernels compile for every GPU, without one: to PTX that takes TensorRT's arguments alone, and on to
machine code.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes import UserError
from tests.xl_export.tensorrt.cases import CASES
from xl_export.tensorrt.compile import (
    JOINS,
    PTX_VERSIONS,
    SHARED_BYTES,
    Kernel,
    Sizes,
    Tactic,
    compile_kernel,
    constants,
    join_constants,
    tactics,
)
from xl_export.tensorrt.operator import INPUTS, Attributes

triton = pytest.importorskip("triton")

ATTRIBUTES = Attributes(full_mask=0, nearest=0, initial_masked=1, persistent=0)
BASE = Sizes(
    heads=8, head_dim=64, table_heads=8, table_rows=1601, bias_heads=1, bias_rows=1, persistent_rows=1
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def assembled(kernel: Kernel, folder: Path) -> dict[str, int]:
    """Registers and bytes of spilled ones, as the assembler reports them for the PTX's own GPU."""
    target = re.search(r"\.target (sm_(\d+)a?)", kernel.ptx)
    assert target is not None
    (folder / "kernel.ptx").write_text(kernel.ptx)
    tool = triton.knobs.nvidia.ptxas_blackwell if int(target[2]) >= 100 else triton.knobs.nvidia.ptxas
    command = [
        tool.path,
        "-v",
        "--gpu-name",
        target[1],
        str(folder / "kernel.ptx"),
        "-o",
        str(folder / "kernel.cubin"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (folder / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    found = {what: re.search(rf"(\d+) {what}", result.stderr) for what in ("registers", "bytes spill stores")}
    return {what: int(match[1]) for what, match in found.items() if match}


def fixed_of(tactic: Tactic, sizes: Sizes, attributes: Attributes) -> dict[str, int]:
    join = tactic.kernel == "join_parts"
    return join_constants(tactic, sizes.head_dim) if join else constants(tactic, sizes, attributes)


@pytest.mark.parametrize(
    "tactic", [tactics(64)[0], tactics(64)[-1], JOINS[0]], ids=lambda tactic: tactic.kernel
)
@pytest.mark.parametrize(
    "compute_capability",
    [75, 90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 87, 89, 100, 120))],
)
def test_the_kernels_compile_for_every_gpu(compute_capability: int, tactic: Tactic, tmp_path: Path) -> None:
    kernel = compile_kernel(tactic, fixed_of(tactic, BASE, ATTRIBUTES), compute_capability=compute_capability)
    version = re.search(r"\.version (\d+)\.(\d+)", kernel.ptx)
    assert version is not None
    assert int(version[1] + version[2]) == PTX_VERSIONS[compute_capability]
    parameters = re.findall(r"\.param \.(\w+) ", kernel.ptx.split(f".entry {kernel.name}(")[1].split(")")[0])
    tensors = (
        (3, 1) if tactic.kernel == "join_parts" else (len(INPUTS), 2)
    )  # inputs, two integers, outputs: nothing hidden
    assert parameters == ["u64"] * tensors[0] + ["u32", "u32"] + ["u64"] * tensors[1]
    assert f".reqntid {kernel.threads}" in kernel.ptx
    assert kernel.shared_bytes <= SHARED_BYTES
    usage = assembled(kernel, tmp_path)
    if compute_capability >= 80:  # before, the compiler has no tensor cores for us
        assert usage["bytes spill stores"] == 0
        assert ("mma.sync" in kernel.ptx or "tcgen05.mma" in kernel.ptx) == (
            tactic.kernel == "segment_attention"
        )
    if tactic.block_t == 1:
        assert "ld.global.v4" in kernel.ptx  # 16 bytes for each thread at a time


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [41, 128])
def test_every_tactic_fits_a_small_gpu(head_dim: int, tmp_path: Path) -> None:
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
    for tactic in (*tactics(head_dim), *JOINS):
        kernel = compile_kernel(tactic, fixed_of(tactic, sizes, attributes), compute_capability=87)
        assert kernel.shared_bytes <= SHARED_BYTES, tactic
        assert assembled(kernel, tmp_path)["registers"] <= 255
    assert {tactic.block_t > 1 for tactic in tactics(head_dim)} == {False, True}


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
            tactics(64)[0],
            constants(tactics(64)[0], sizes, ATTRIBUTES),
            compute_capability=compute_capability,
        )


@pytest.mark.slow
def test_a_kernel_that_needs_more_shared_memory_than_granted_is_refused() -> None:
    with pytest.raises(UserError, match=r"every GPU has 49152"):
        compile_kernel(
            tactics(64)[-1],
            constants(tactics(64)[-1], BASE, ATTRIBUTES),
            compute_capability=86,
            dtype="float32",
        )
