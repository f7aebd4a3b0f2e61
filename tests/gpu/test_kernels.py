"""The kernels on a GPU compute what the naive operator computes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cases.on_gpu import triton_kernel
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.driver import try_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("name", CASES)
def test_embedded_ptx_equals_the_naive_operator(name: str) -> None:
    failed = [tried for tried in try_kernels({name: CASES[name]}, repeats=2) if not tried.passed]
    assert failed == []


def test_every_form_of_attention_is_timed() -> None:
    pytest.importorskip("triton")
    shapes = (
        triton_kernel.Shape(B=2, H=3, T=5, M=12, K=16),
        triton_kernel.Shape(B=1, H=2, T=1, M=40, K=32),
    )
    rows: list[Any] = triton_kernel.run(shapes)
    assert {"eager", "torch.compile", "FlexAttention"} < {row.side for row in rows}
    assert [row for row in rows if row.problem] == []
