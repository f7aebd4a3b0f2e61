"""The forms of attention that the kernel is measured against compute the same; timing them needs a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import triton_kernel
from benchmarks.compare import find_results
from benchmarks.history import append
from xl_export.tensorrt.naive import naive_relative_attention

SHAPE = triton_kernel.Shape(B=2, H=3, T=5, M=12, K=16)


def test_the_other_forms_equal_the_naive_operator() -> None:
    tensors = triton_kernel.inputs(SHAPE, device="cpu", dtype=torch.float32)
    truth = naive_relative_attention(*tensors, attributes=triton_kernel.ATTRIBUTES)
    arguments = (*tensors[:3], *tensors[4:7])
    assert (triton_kernel.eager(*arguments) - truth).abs().max() < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FlexAttention is slow until it is compiled
        answer = triton_kernel.flex(*arguments, triton_kernel.flex_mask(*tensors[:2]))
    assert (answer - truth).abs().max() < 1e-5


def test_the_least_that_must_be_read_and_multiplied() -> None:
    shape = triton_kernel.Shape(B=1, H=1, T=1, M=3, K=2)
    assert shape.num_bytes == 2 * (2 + 2 + 4 * 2 + 4 * 2 + 4 * 2)  # query, answer, keys, values, table
    assert shape.multiply_adds == 3 * 4 * 2  # each of 4 keys: content, position, value


def test_a_result_can_stand_in_the_history_beside_those_of_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    row = triton_kernel.Row(
        shape=SHAPE, side="eager", milliseconds=1.0, reading=0.1, computing=0.1, difference=0.0
    )
    document = triton_kernel.document([row])
    append(tmp_path / "kernel.jsonl", document)
    assert find_results(document["time"][:10], tmp_path) == [document]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton")
    result = CliRunner().invoke(main, ["kernel", "--history", str(tmp_path / "history.jsonl")])
    assert result.exit_code == 2
    assert "PyTorch finds no NVIDIA GPU here" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_every_side_is_measured_on_a_gpu() -> None:
    rows = triton_kernel.run([SHAPE, triton_kernel.Shape(B=1, H=2, T=1, M=40, K=32)])
    assert {"eager", "torch.compile", "FlexAttention"} < {row.side for row in rows}
    assert all(row.milliseconds > 0 and row.difference <= triton_kernel.TOLERANCE for row in rows)
    assert len(triton_kernel.table(rows)) == 2 + len(rows)
