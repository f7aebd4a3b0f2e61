"""The kernels on a GPU compute what the naive operator computes."""

from __future__ import annotations

import numpy as np
import pytest

from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.compile import JOINS, tactics
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
