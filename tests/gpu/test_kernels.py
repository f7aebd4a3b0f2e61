"""The kernels on a GPU compute what the naive operator computes: through Triton, and as embedded PTX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases.on_gpu import triton_kernel
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.compile import JOINS, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, naive_answer, try_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("name", CASES)
def test_embedded_ptx_equals_the_naive_operator(name: str) -> None:
    failed = [tried for tried in try_kernels({name: CASES[name]}, repeats=2) if not tried.passed]
    assert failed == []


@pytest.mark.parametrize("name", CASES)
def test_triton_kernels_equal_the_naive_operator(name: str) -> None:
    pytest.importorskip("triton")
    from tests.xl_export.tensorrt.kernels.cases import SMALL
    from xl_export.tensorrt.kernels.launch import launch, make_scratch

    case = CASES[name]
    inputs = [torch.from_numpy(array).cuda() for array in case.inputs().values()]
    major, minor = torch.cuda.get_device_capability()
    for tactic in (*SMALL, *tactics(case.K, 10 * major + minor, case.dtype)):
        answer = torch.full_like(inputs[0], torch.nan)
        for join in JOINS:
            launch(
                tactic,
                inputs,
                answer,
                attributes=case.attributes,
                mem_len=case.mem_len,
                scratch=make_scratch(inputs[0]),
                join=join,
            )
        assert np.abs(answer.cpu().numpy() - naive_answer(case)).max() < TOLERANCES[case.dtype], tactic


def test_every_form_of_attention_is_timed() -> None:
    pytest.importorskip("triton")
    shapes = (
        triton_kernel.Shape(B=2, H=3, T=5, M=12, K=16),
        triton_kernel.Shape(B=1, H=2, T=1, M=40, K=32),
    )
    rows: list[Any] = triton_kernel.run(shapes)
    assert {"eager", "torch.compile", "FlexAttention"} < {row.side for row in rows}
    assert [row for row in rows if row.problem] == []
