"""The forms of attention that the kernel is measured against compute the same; timing them needs a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.cases.on_gpu import triton_kernel
from benchmarks.cases.on_gpu.rates import Rates
from benchmarks.configs import CONFIGS
from benchmarks.measure import Timing
from tests.benchmarks.shown import call, on_terminal, rows_of
from xl_export.tensorrt.kernels.compile import tactics
from xl_export.tensorrt.naive import naive_relative_attention

SHAPE = triton_kernel.Shape(B=2, H=3, T=5, M=12, K=16)


def test_the_other_forms_equal_the_naive_operator() -> None:
    tensors = triton_kernel.inputs(SHAPE, device="cpu", dtype=torch.float32)
    arrays = [tensor.numpy() for tensor in tensors]
    expected = torch.from_numpy(naive_relative_attention(*arrays, attributes=triton_kernel.ATTRIBUTES))
    arguments = (*tensors[:3], *tensors[4:7])
    assert (triton_kernel.eager(*arguments) - expected).abs().max() < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FlexAttention is slow until it is compiled
        answer = triton_kernel.flex(*arguments, triton_kernel.flex_mask(*tensors[:2]))
    assert (answer - expected).abs().max() < 1e-5


def test_the_least_that_must_be_read_and_multiplied() -> None:
    shape = triton_kernel.Shape(B=1, H=1, T=1, M=3, K=2)
    assert shape.num_bytes == 2 * (2 + 2 + 4 * 2 + 4 * 2 + 4 * 2)  # query, answer, keys, values, table
    assert shape.multiply_adds == 3 * 4 * 2  # each of 4 keys: content, position, value


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_case_is_skipped(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    result = call("run", "triton-kernel", "--history", tmp_path / "history.jsonl")
    assert result.exit_code == 0
    assert result.stdout.startswith("triton-kernel is skipped: PyTorch finds no NVIDIA GPU")
    assert list(tmp_path.iterdir()) == []


def test_only_right_sides_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> torch.Tensor:
        raise RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered")

    def sides(tensors: Sequence[torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
        given = (*tensors[:3], *tensors[4:7])
        return {
            "wrong": lambda: triton_kernel.eager(*given) + 0.1,
            "failing": failing,
            "right": lambda: triton_kernel.eager(*given),
        }

    time = Timing(median=1.0, fastest=0.5, slowest=2.0, repeats=9)
    rates = Rates(copy=1e12, halves=1e14, singles=1e13, launch=1.0)
    monkeypatch.setattr(triton_kernel, "DEVICE", "cpu")
    monkeypatch.setattr(triton_kernel, "measure_rates", lambda: rates)
    monkeypatch.setattr(triton_kernel, "sides", sides)
    monkeypatch.setattr(triton_kernel, "gpu_timing", lambda call, repeats: time)
    monkeypatch.setattr(triton_kernel, "_tactics", lambda shape: tactics(16, 80)[:1])
    monkeypatch.setattr(triton_kernel, "SHAPES", [SHAPE])
    rows = {row.side: row for row in rows_of("triton-kernel", CONFIGS["small"])}
    assert [side for side, row in rows.items() if row.attention] == ["right"]
    assert "differs from float64 by 0.1" in rows["wrong"].problem
    assert "illegal instruction" in rows["failing"].problem
    (embedded,) = (row for side, row in rows.items() if side.startswith("PTX "))
    assert embedded.problem  # the driver needs a GPU
    assert rows["right"].computing == SHAPE.multiply_adds / 1e14 * 1e3
    assert any("differs from float64" in line for line in on_terminal("triton-kernel", [*rows.values()]))
