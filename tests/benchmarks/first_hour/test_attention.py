"""The step `attention` on the CPU: each row belongs to the shape and the side that were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases.on_gpu import triton_kernel as case
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import attention

SHAPES = tuple(case.Shape(B=batch, H=2, T=3, M=memory, K=8) for batch, memory in ((1, 6), (2, 9), (3, 12)))


@pytest.fixture
def computed(record: Record, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of a batch in each call that was timed. Two sides are right, and one is wrong."""
    rows: list[int] = []

    def sides(tensors: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
        given = (*tensors[:3], *tensors[4:7])
        made = {name: (lambda: case.eager(*given)) for name in ("eager", "again")}
        return {**made, "wrong": lambda: case.eager(*given) + 0.1}

    def seconds(call: Callable[[], Tensor], *, repeats: int) -> list[float]:
        rows.append(call().shape[0])
        return [1e-3] * repeats

    record.quick = False  # which would take the first shape alone
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "torch_seconds", seconds)
    monkeypatch.setattr(case, "SHAPES", SHAPES)
    monkeypatch.setattr(case, "sides", sides)
    return rows


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A function of the case that raises an error when it is called for the shape of this number."""
    really, calls = getattr(case, name), iter(range(len(SHAPES)))

    def failing(*given: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered")
        return really(*given, **options)

    monkeypatch.setattr(case, name, failing)


def test_every_right_side_is_timed_at_every_shape(record: Record, computed: list[int]) -> None:
    pytest.importorskip("triton")
    attention.run(record)
    assert computed == [1, 1, 2, 2, 3, 3]
    assert [check.passed for check in record.result.checks] == [True, True, False] * 3
    found = [(row.model, row.side, row.batch, row.tokens) for row in record.result.rows]
    assert found == [
        (f"attention, H 2 K 8 M {shape.M}", side, shape.B, 3)
        for shape in SHAPES
        for side in ("eager", "again")
    ]
    assert all(row.limit_milliseconds and row.milliseconds == 1 for row in record.result.rows)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["inputs", "sides"])
def test_a_shape_that_fails_is_not_timed_and_ends_no_other(
    number: int, name: str, record: Record, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    fail_at(number, monkeypatch, name)
    attention.run(record)
    record.finish()
    others = [shape for shape in SHAPES if shape is not SHAPES[number]]
    assert computed == [shape.B for shape in others for _ in range(2)]
    assert [row.batch for row in record.result.rows] == computed
    failed = [check for check in record.result.checks if "illegal instruction" in check.sentence]
    shape = SHAPES[number]
    assert [(check.name, check.passed) for check in failed] == [
        (f"B {shape.B} T 3 H 2 K 8 M {shape.M}", False)
    ]
    assert len(record.result.checks) == 7
    assert record.result.status == "failed"
