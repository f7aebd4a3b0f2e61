"""The kernels of products for `cuda`, as the package carries them, executed on the CPU by `tests/ptx`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ptx.driver import EmulatedDriver
from tests.ptx.product import CASES, ENDS, TOLERANCES, Case, all_shipped, check_end, check_few_rows, shipped
from tests.xl_export.tensorrt.kernels.resources import resources
from xl_export.tensorrt.kernels.compile import REGISTERS
from xl_export.tensorrt.kernels.ready import PRODUCT_ROWS, end_kernel, product_kernel

EMULATED = EmulatedDriver(75, multiprocessors=1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_few_rows_equal_the_naive_product(case: Case, dtype: str) -> None:
    check_few_rows(EMULATED, case, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
def test_the_end_of_a_product_equals_the_naive_one(case: Case, dtype: str) -> None:
    check_end(EMULATED, case, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_weights_are_read_in_pieces_of_16_bytes(dtype: str) -> None:
    for rows in PRODUCT_ROWS:
        ptx = shipped(dtype, rows).kernel.ptx
        # The matrix is the first tensor that is read.
        assert ptx[ptx.index("ld.global") :].startswith("ld.global.v4.b32")


def test_sums_have_one_order() -> None:
    """A step repeats bit for bit, because no program adds to what another one wrote."""
    for one in all_shipped():
        assert not re.search(r"\b(atom|red)\.", one.kernel.ptx)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_new_compilation_fits_a_gpu(dtype: Any) -> None:
    pytest.importorskip("triton")
    for kernel in (*(product_kernel(rows, dtype) for rows in PRODUCT_ROWS), end_kernel(dtype)):
        found = resources(kernel)
        assert found.registers * kernel.threads * 2 <= REGISTERS  # two programs of a multiprocessor
        assert found.spilled == 0
