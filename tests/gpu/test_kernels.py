"""The kernels on a GPU compute what the naive operator computes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases.on_gpu import triton_kernel
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


def test_every_form_of_attention_is_timed() -> None:
    pytest.importorskip("triton")
    shapes = (
        triton_kernel.Shape(B=2, H=3, T=5, M=12, K=16),
        triton_kernel.Shape(B=1, H=2, T=1, M=40, K=32),
    )
    rows = [row for shape in shapes for row in triton_kernel.measure_shape(shape)]
    assert {"eager", "torch.compile", "FlexAttention"} < {row.side for row in rows}
    assert [row for row in rows if row.problem] == []
