"""What the steps find, with stand-ins for the GPU: right answers are timed, wrong ones are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.first_hour.rates import COPY
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.results import StepResult
from benchmarks.first_hour.steps import (
    embedded,
    engines,
    limits,
    machine,
    models,
    pytorch,
    shapes,
    tests,
    timed,
    training,
)
from benchmarks.first_hour.steps.building import ahead, build_options
from runtimes.base.errors import ArtefactError
from runtimes.contract.engine import load_engine
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from runtimes.sessions.tensorrt.session import TrtSession
from tests import fake_gpu
from trainer.model.config import ModelConfig
from xl_export.tensorrt.naive import naive_relative_attention

ENGINE = {"size": "small", "flavour": "tensorrt", "attention": "native", "form": "ring", "precision": "fp16"}


def test_an_engine_is_compared_and_then_timed_beside_its_limit(
    record: Record, gpu: fake_gpu.FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.run(record, **ENGINE)  # type: ignore[arg-type]
    record.finish()
    result = record.result
    assert [check.passed for check in result.checks] == [True] * 4, result.checks
    assert result.facts["TensorRT, native, ring, fp16: layers of the plan"] == "2"
    assert [(row.batch, row.tokens) for row in result.rows] == [(1, 1), (1, 8), (8, 1), (8, 8)]
    for row in result.rows:
        assert row.milliseconds > 0
        assert row.limit_by == "reading"
    config = models.config_of("small", quick=True)
    for row in result.rows:  # at 2e12 bytes/s
        least = timed.least_bytes(
            config.model, models.rule_of(config), "ring", batch=row.batch, precision="fp16", halves=True
        )
        assert row.limit_milliseconds == pytest.approx(least / 2e12 * 1e3)

    run = TrtSession.run

    def wrong(self: Any, inputs: Any, outputs: Any, memory: Any) -> None:
        run(self, inputs, outputs, memory)
        for array in outputs.values():
            array += np.random.default_rng(0).normal(size=array.shape).astype(array.dtype)

    monkeypatch.setattr(TrtSession, "run", wrong)
    record.result = StepResult(name="wrong")
    engines.run(record, **ENGINE)  # type: ignore[arg-type]
    record.finish()
    assert record.result.status == "failed"
    assert record.result.rows == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "it is not in the folder of the engine"),
        ("a layer", "JSONDecodeError"),
        ('{"Bindings": []}', "KeyError: 'Layers'"),
        ('{"Layers": []}', "it is JSON, and has 0 layers"),
    ],
)
def test_what_an_inspector_did_not_tell_is_a_failure(
    text: str | None, sentence: str, record: Record, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / engines.LAYERS).write_text(text)
    engines.keep_layers(record, "an engine", tmp_path)
    assert [(check.name, check.passed) for check in record.result.checks] == [
        ("an engine: layers.json", False)
    ]
    assert sentence in record.result.checks[0].sentence


def test_the_bytes_of_a_step_are_those_of_its_form_and_precision() -> None:
    rule = MemoryRule(mem_len=24, segment=8)
    config = ModelConfig(layers=1, d_model=32, heads=2, head_dim=16, d_ff=64, vocab_size=256)
    matrices = 4 * 32 * 32 + 2 * 32 * 64 + 64 + 5 * 32 + 2 * 32 + 32 * 256 + 256
    table, memory = 32 * rule.position_rows, 2 * 32 * 25
    for form, precision, batch, expected in (
        ("ring", "fp32", 1, 4 * (matrices + table + memory)),
        ("ring", "fp16", 8, 2 * (matrices + table + 8 * memory)),
        ("shift", "fp16", 8, 2 * (matrices + table + 3 * 8 * memory)),
        ("ring", "int4", 1, matrices / 2 + 2 * (table + memory)),
    ):
        found = timed.least_bytes(
            config,
            rule,
            form,
            batch=batch,
            precision=precision,
            halves=precision != "fp32",  # type: ignore[arg-type]
        )
        assert found == expected
    small = timed.least_bytes(config, rule, "ring", batch=1, precision="fp32", halves=False, memory="int8")
    assert small == 4 * (matrices + table) + memory
    stored = timed.least_bytes(config, rule, "ring", batch=1, precision="fp16", halves=False)
    assert stored == 2 * matrices + 4 * (table + memory)


@pytest.mark.parametrize(("leak", "passed"), [(0, True), (1 << 20, False)])
def test_memory_that_leaks_is_found(leak: int, passed: bool, record: Record, gpu: fake_gpu.FakeCuda) -> None:
    free = 1 << 36

    def leaking() -> tuple[Any, int, int]:
        nonlocal free
        free -= leak
        return gpu.cudaError_t.cudaSuccess, free, 1 << 36

    gpu.cudaMemGetInfo = leaking  # type: ignore[attr-defined]
    shapes.run(record, what="native")
    stays = next(check for check in record.result.checks if check.name == "device memory stays")
    assert stays.passed is passed, stays
    (series,) = record.result.series.values()
    assert len(series) > shapes.SAMPLES
    assert all(check.passed for check in record.result.checks if check is not stays)


def test_every_option_of_a_build_is_tried_and_an_engine_is_refitted(
    record: Record, gpu: fake_gpu.FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refit(engine: Path, artefact: Path, out: Path) -> None:
        assert load_engine(engine)[0].artefact != load_spec(artefact).identity, "the weights are others"
        fake_gpu.make_engine(artefact, out)

    monkeypatch.setattr(build_options, "CHANGES", {"--workspace-mib 64": {"workspace_mib": 64}})
    monkeypatch.setattr(build_options, "refit", refit)
    build_options.run(record)
    names = ["--workspace-mib 64", "--timing-cache, empty", "--timing-cache, used again", "--refit", "refit"]
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in names]


def test_growth_counts_what_comes_after_the_warm_up() -> None:
    assert shapes.growth([0, 100, 200, 200, 200, 200]) == 100
    assert shapes.growth([0.0, 5.0] + [5.0] * 20) == 0


def test_rates_without_pytorch_and_with_a_driver_that_refuses(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    good, calls = SimpleNamespace(name="cudaSuccess"), {"n": 0}

    def elapsed(start: int, end: int) -> tuple[Any, float]:
        calls["n"] += 1
        return good, 2.0 if calls["n"] % 2 else 4.0  # milliseconds

    stub = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=good),
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToDevice=3),
        cudaMalloc=lambda n: (good, 256),
        cudaEventElapsedTime=elapsed,
        **{
            name: lambda *a: (good, 1)
            for name in (
                "cudaFree",
                "cudaEventCreate",
                "cudaEventRecord",
                "cudaMemcpyAsync",
                "cudaEventSynchronize",
            )
        },
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", stub)  # type: ignore[arg-type]
    limits.run(record)
    assert max(record.result.series[COPY]) == pytest.approx(2 * limits.QUICK_COPIED / 2e-3)
    assert "sees no GPU" in record.result.facts["products"]
    stub.cudaMalloc = lambda n: (SimpleNamespace(name="cudaErrorMemoryAllocation"), 0)
    record.result = StepResult(name="limits")
    limits.run(record)
    record.finish()
    assert record.result.status == "out of memory"


def test_training_compares_losses_before_it_times(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "max_memory_allocated": 3 << 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(training, "DEVICE", "cpu")
    wanted = ("fp32", "bf16, checkpointed activations")
    monkeypatch.setattr(training, "VARIANTS", {name: training.VARIANTS[name] for name in wanted})
    training.run(record)
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in wanted]
    assert [row.side for row in record.result.rows] == list(wanted)
    assert record.result.facts["device memory, fp32"] == "3.00 GiB at most"


def test_pytorch_is_compared_with_the_cpu(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pytorch, "DEVICE", "cpu")
    monkeypatch.setattr(pytorch, "SIDES", ((False, False),))
    pytorch.run(record, size="small")
    assert [check.passed for check in record.result.checks] == [True], record.result.checks
    assert len(record.result.rows) == 4
    monkeypatch.setattr(pytorch.timed, "tolerance_of", lambda precision: -1.0)
    record.result = StepResult(name="again")
    pytorch.run(record, size="small")
    assert record.result.rows == ()


def test_what_pytest_reports_becomes_checks(record: Record) -> None:
    def report(name: str, outcome: str, longrepr: Any = None, when: str = "call") -> SimpleNamespace:
        kinds = {kind: kind == outcome for kind in ("passed", "failed", "skipped")}
        return SimpleNamespace(nodeid=name, when=when, longrepr=longrepr, **kinds)

    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2"))
    reporter = tests.Reporter(record)
    for given in (
        report("one", "passed", when="setup"),
        report("one", "passed"),
        report("two", "failed", crash),
        report("three", "skipped", ("x.py", 3, "tensorrt is not installed"), when="setup"),
    ):
        reporter.pytest_runtest_logreport(given)
    kept = StepResult(name="step", checks=record.result.checks)
    reporter.finish(1)
    record.finish()
    assert [(check.name, check.sentence) for check in kept.checks] == [("two", "assert 1 == 2")]
    assert record.result.status == "failed"
    assert record.result.sentence == "1 passed, 1 failed, 1 skipped of the tests that need a GPU"
    assert record.result.facts == {"skipped: tensorrt is not installed": "1"}

    record.result = StepResult(name="nothing")
    reporter = tests.Reporter(record)
    reporter.pytest_runtest_logreport(report("four", "skipped", ("x.py", 3, "no GPU"), when="setup"))
    reporter.finish(0)
    record.finish()
    assert record.result.status == "failed", "where every test is skipped, nothing was shown"


def test_the_machine_without_a_gpu(record: Record) -> None:
    machine.run(record)
    record.finish()
    facts = record.result.facts
    assert record.result.status == "passed", record.result
    assert facts["torch"] == torch.__version__
    assert "no GPU" in facts
    assert not any(word in str(facts) for word in (str(Path.home()) + "/", str(Path.cwd())))


@pytest.mark.slow
def test_engines_for_every_gpu_are_built_ahead_of_time(record: Record) -> None:
    pytest.importorskip("tensorrt_rtx")
    ahead.run(record)
    record.finish()
    assert record.result.status == "passed", record.result
    assert len(record.result.checks) == 2


def test_embedded_ptx_is_checked_case_by_case_and_an_error_ends_one_case_alone(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(embedded.CASES)[: embedded.QUICK_CASES]
    tactic = SimpleNamespace(kernel="token_attention", block_t=1, block_j=64)

    def tried(cases: dict[str, Any], *, driver: Any) -> Any:
        if list(cases) == names[:1]:
            raise ArtefactError("the GPU's driver reports CUDA_ERROR_INVALID_PTX; please report this.")
        for passed in (True, False):
            difference = 1e-4 if passed else 0.5
            known = {"difference": difference, "tolerance": 3e-3, "milliseconds": 0.01}
            yield SimpleNamespace(tactic=tactic, join=tactic, passed=passed, **known)

    monkeypatch.setattr(embedded, "Driver", lambda: SimpleNamespace(multiprocessors=16))
    monkeypatch.setattr(embedded, "try_kernels", tried)
    monkeypatch.setattr(embedded, "PUBLISHED", {})
    embedded.run(record)
    assert [(check.name.split(",")[0], check.passed) for check in record.result.checks] == [
        (names[0], False),
        (names[1], True),
        (names[1], False),
    ]
    assert "CUDA_ERROR_INVALID_PTX" in record.result.checks[0].sentence
    assert "differs from float64 by at most 5.00e-01" in record.result.checks[2].sentence


TOKEN_TILES = ["token_attention 1 x 64", "token_attention 1 x 128"]


@pytest.mark.parametrize("error", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "tokens", "tiles"),
    [
        ("enwik8-base, half a segment", 16, [*TOKEN_TILES, "segment_attention 16 x 32"]),
        ("enwik8-base, ring", 1, TOKEN_TILES),
    ],
)
def test_embedded_ptx_is_timed_where_its_answer_is_right(
    name: str,
    tokens: int,
    tiles: list[str],
    error: float,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = dataclasses.replace(embedded.PUBLISHED[name], T=tokens, M=50, R=51)

    def run_embedded(
        driver: Any, inputs: Any, attributes: Any, *, mem_len: int | None, repeats: int, **_: Any
    ) -> Any:
        answer = naive_relative_attention(*inputs.values(), attributes=attributes, mem_len=mem_len) + error
        return SimpleNamespace(answer=answer, milliseconds=tuple(float(n) for n in range(repeats, 0, -1)))

    monkeypatch.setattr(embedded, "run_embedded", run_embedded)
    driver: Any = SimpleNamespace(gpu=fake_gpu.GPU, multiprocessors=16)
    embedded.time_case(record, driver, "a case", case)
    assert {check.passed for check in record.result.checks} == {error == 0}
    sides = [row.side for row in record.result.rows]
    assert all(row.milliseconds == 15.5 and row.limit_by == "reading" for row in record.result.rows)
    assert sides == ([] if error else [f"embedded PTX, {name}" for name in tiles])
