"""The case `gpu` with stand-ins: right answers are timed with their limits, and wrong ones are not."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cases.on_gpu import gpu, sides
from benchmarks.cases.on_gpu.rates import Rates
from benchmarks.cases.on_gpu.sides import Graph, matching
from benchmarks.configs import CONFIGS
from runtimes.base.errors import ConfigError
from runtimes.base.files import write_json
from runtimes.base.records import from_json, to_json
from runtimes.sessions.tensorrt.session import TrtSession
from tests.benchmarks.shown import on_terminal
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
    assert [(row.batch, row.tokens) for row in rows] == STEPS
    graph = Graph(target="tensorrt", precision="fp16")
    for row in rows:
        assert row.batch is not None
        assert row.step is not None
        assert row.step.median > 0
        assert row.reading == gpu.least_bytes(TINY, graph, row.batch, halves=True) / 2e12 * 1e3
        assert row.computing is not None
        assert from_json(gpu.Row, to_json(row), where="row") == row
    assert on_terminal("gpu", [*rows, gpu.Row(side="rates", fact="fast")])[-1].endswith("fast")


def test_a_wrong_engine_is_not_timed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrtSession.run

    def wrong(self: Any, inputs: Any, outputs: Any, memory: Any) -> None:
        run(self, inputs, outputs, memory)
        for array in outputs.values():
            array += np.random.default_rng(0).normal(size=array.shape).astype(array.dtype)

    monkeypatch.setattr(TrtSession, "run", wrong)
    (row,) = gpu.measure("tensorrt-native-ring-fp16", TINY, work, None)
    assert row.step is None
    assert "scores differ from the CPU's" in row.problem


def test_pytorch_and_training_are_compared_and_timed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(gpu.measure("pytorch-fp32", TINY, work, 2))
    assert [(row.batch, row.tokens) for row in rows] == STEPS
    (row,) = gpu.measure("training-fp32", TINY, work, 2)
    assert (row.batch, row.tokens, row.problem) == (2, 8, "")
    monkeypatch.setattr(sides, "LOSS_TOLERANCES", {"none": -1.0})
    (row,) = gpu.measure("training-fp32", TINY, work, 2)
    assert "differs from the CPU" in row.problem


def test_the_crash_of_a_side_is_a_row(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    (row,) = gpu.in_process("rates", CONFIGS["small"], work, None)
    assert row.problem == "its process ended with exit code 1"


def test_every_row_is_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "in_process", lambda name, *_: [gpu.Row(side=name)])
    kept: list[gpu.Row] = []
    names = matching(["rtx-onnx-*", "training-fp16"], gpu.NAMES)
    rows = gpu.CASE.measure(TINY, options={"names": names}, keep=kept.append)
    assert [row.side for row in kept] == ["rates", "rtx-onnx-attention", "training-fp16"]
    assert rows == kept
    with pytest.raises(ConfigError, match="'engine' is not a side; give one of tensorrt-native-ring-fp16"):
        matching(["engine"], gpu.NAMES)


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
