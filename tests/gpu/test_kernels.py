"""The kernels on a GPU compute what the naive operator computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import product
from tests.ptx.ring import NaiveRing, Types, all_shipped, check
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.compile import JOINS, Kernel, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, Driver, naive_answer, run_embedded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("name", CASES)
def test_embedded_ptx_equals_the_naive_operator(name: str) -> None:
    case, driver = CASES[name], Driver()
    expected = naive_answer(case)
    for tactic in tactics(case.K, driver.gpu.capability, case.dtype):
        for join in JOINS:
            got = run_embedded(
                driver, case.inputs(), case.attributes, mem_len=case.mem_len, tactic=tactic, join=join
            )
            assert np.abs(got.answer - expected).max() <= TOLERANCES[case.dtype], (tactic, join)


@pytest.mark.parametrize(
    ("widest", "types", "kernel"),
    [pytest.param(*row, id=f"{row[2].name}-{row[0]}-{'-'.join(row[1])}") for row in all_shipped()],
)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_kernels_of_the_node_equal_the_naive_one(
    widest: int, types: Types, kernel: Kernel, parts: int
) -> None:
    driver = Driver()
    if kernel.block_t > 1 and driver.gpu.capability < 80:
        pytest.skip("tiles need compute capability 8.0")
    ring = NaiveRing(first=[0, 700, -3], K=widest, H=4, M=300, types=types, N=5, gap=8, spare=130)
    check(driver, ring, kernel, [130, 1, 2, 70] if kernel.block_t > 1 else [3, 1], parts)


@pytest.mark.parametrize("dtype", product.TOLERANCES)
def test_the_kernels_of_products_equal_the_naive_one(dtype: str) -> None:
    driver = Driver()
    for case in (*product.CASES.values(), product.Case(8, 2048, 512, product.ALL)):
        product.check_few_rows(driver, case, dtype)
    for case in product.ENDS.values():
        product.check_end(driver, case, dtype)
