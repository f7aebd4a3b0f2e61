from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks import machine, measure
from benchmarks.__main__ import main
from benchmarks.configs import CONFIGS, BenchmarkConfig
from trainer.model.config import ModelConfig

TINY = BenchmarkConfig(
    name="tiny",
    model=ModelConfig(layers=2, d_model=16, heads=2, head_dim=4, d_ff=24, vocab_size=256),
    segment=8,
    mem_len=12,
    lengths=(8, 20),
    repeats=3,
    token_repeats=4,
    training_batch=2,
)


def call(*arguments: object) -> Result:
    """The result of `python -m benchmarks`."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def a_result(case: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A line of the history, of an idle machine."""
    return {
        "case": case,
        "config": "tiny",
        "command": f"python -m benchmarks run {case}",
        "threads": 2,
        "time": "2026-11-01T10:00:00+00:00",
        "machine": {"cpu": "A", "cpus": 2, "busy_cpus": 0.0},
        "versions": {"onnxruntime": "1.31.1"},
        "limits": {"read_bytes": 1e9, "multiply_adds": 1e9},
        "commit": "0123456789abcdef+",
        "rows": rows,
        **changes,
    }


@pytest.fixture(scope="module", autouse=True)
def kernel_of_benchmarks(no_kernel: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of their own for the kernels that benchmarks build, so that the tests after them find none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_limits() -> Iterator[None]:
    """The limits of the machine are measured in a moment instead of four seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "READ_BYTES", 1 << 20)
        patch.setattr(measure, "cache_bytes", lambda: 0)
        patch.setattr(measure, "MATRIX_SIDE", 64)
        patch.setattr(measure, "REST_SECONDS", 0)
        patch.setattr(machine, "busy_cpus", lambda: 0.0)
        yield


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchmarkConfig]:
    """The configuration `tiny`, with one thread."""
    monkeypatch.setitem(CONFIGS, TINY.name, TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TINY
    torch.set_num_threads(threads)


@pytest.fixture
def measured(tiny: BenchmarkConfig, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`measured(case, *options)`: runs a case, and returns the result that it appended to the history."""

    def run(*arguments: object) -> dict[str, Any]:
        history = tmp_path / "history.jsonl"
        config = () if "--config" in arguments else ("--config", "tiny")
        result = call("run", *arguments, *config, "--threads", 1, "--history", history)
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(history.read_text(encoding="utf-8").splitlines()[-1])
        return document

    return run
