"""The case `gpu` with stand-ins: right answers are timed with their limits, and wrong ones are not."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import gpu
from benchmarks.gpu import sides
from benchmarks.gpu.rates import Rates
from benchmarks.gpu.sides import Graph
from benchmarks.harness import cells, matching, measure_case
from runtimes.base.files import write_json
from runtimes.sessions.tensorrt.session import TrtSession
from tests.benchmarks.conftest import a_result
from tests.gpu import stand_ins
from tests.gpu.stand_ins import TINY

RATES = Rates(copy=2e12, halves=1e14, singles=1e13, launch=1.0)
STEPS = [(1, 1), (1, 8), (8, 1), (8, 8)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of the case on the stand-in, after its rates were measured."""
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    write_json(tmp_path / "rates.json", asdict(RATES))
    return tmp_path


def test_an_engine_is_timed_with_its_limits(work: Path) -> None:
    rows = list(gpu.measure("tensorrt-native-ring-fp16", TINY, work, None))
    assert [(row["batch"], row["tokens"]) for row in rows] == STEPS
    graph = Graph(target="tensorrt", precision="fp16")
    for row in rows:
        assert row["step_ms"]["median"] > 0
        assert row["reading_ms"] == gpu.least_bytes(TINY, graph, row["batch"], halves=True) / 2e12 * 1e3
        assert row["computing_ms"] > 0
    rows.append({"side": "rates", "fact": "fast"})
    _, table = cells(gpu.COLUMNS, [(row, a_result("gpu", rows)) for row in rows])
    assert table[-1][-1] == "fast"


def test_a_wrong_engine_is_not_timed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrtSession.run

    def wrong(self: Any, inputs: Any, outputs: Any, memory: Any) -> None:
        run(self, inputs, outputs, memory)
        for array in outputs.values():
            array += np.random.default_rng(0).normal(size=array.shape).astype(array.dtype)

    monkeypatch.setattr(TrtSession, "run", wrong)
    (row,) = gpu.measure("tensorrt-native-ring-fp16", TINY, work, None)
    assert "step_ms" not in row
    assert "scores differ from the CPU's" in row["problem"]


def test_pytorch_and_training_are_compared_and_timed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(gpu.measure("pytorch-fp32", TINY, work, 2))
    assert [(row["batch"], row["tokens"]) for row in rows] == STEPS
    (row,) = gpu.measure("training-fp32", TINY, work, 2)
    assert (row["batch"], row["tokens"]) == (2, 8)
    monkeypatch.setattr(sides, "LOSS_TOLERANCES", {"none": -1.0})
    (row,) = gpu.measure("training-fp32", TINY, work, 2)
    assert "differs from the CPU" in row["problem"]


def test_the_crash_of_a_side_is_a_row(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    (row,) = gpu.in_process("rates", work, None)
    assert row["problem"] == "its process ended with exit code 1"


def test_every_row_is_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "in_process", lambda name, *_: [{"side": name, "fact": ""}])
    kept: list[Any] = []
    names = matching(["rtx-onnx-*", "training-fp16"], gpu.NAMES)
    document = measure_case("gpu", gpu, TINY, options={"only": names}, keep=kept.append)
    sides_kept = [[row["side"] for row in result["rows"]] for result in kept]
    assert sides_kept == [["rates"], ["rtx-onnx-attention"], ["training-fp16"]]
    assert [row["side"] for row in document["rows"]] == ["rates", "rtx-onnx-attention", "training-fp16"]


def test_the_bytes_of_a_step_follow_from_form_and_precision() -> None:
    model, rule = TINY.model, gpu.rule_of(TINY)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64 + 64 + 5 * 32 + 2 * 32) + 32 * 256 + 256
    table, memory = model.layers * 32 * rule.position_rows, model.layers * 2 * 32 * 25
    cases: list[tuple[dict[str, Any], int, bool, float]] = [
        ({}, 1, False, 4 * (matrices + table + memory)),
        ({"precision": "fp16"}, 8, True, 2 * (matrices + table + 8 * memory)),
        ({"precision": "fp16", "form": "shift"}, 8, True, 2 * (matrices + table + 3 * 8 * memory)),
        ({"precision": "int4"}, 1, True, matrices / 2 + 2 * (table + memory)),
        ({"memory": "int8"}, 1, False, 4 * (matrices + table) + memory),
        ({"precision": "fp16"}, 1, False, 2 * matrices + 4 * (table + memory)),
    ]
    for changes, batch, halves, expected in cases:
        assert gpu.least_bytes(TINY, Graph(**changes), batch, halves=halves) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_is_no_problem_of_a_side(
    error: BaseException, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(gpu, "_rows_of", stopped)
    with pytest.raises(type(error)):
        list(gpu.measure("pytorch-fp32", TINY, work, 2))
