from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import click
import pytest
import torch

from benchmarks import machine, measure
from benchmarks.case import OPTIONS
from benchmarks.cases import steps
from benchmarks.configs import CONFIGS, BenchmarkConfig
from benchmarks.measure import Timing
from trainer.model.config import ModelConfig

TINY = BenchmarkConfig(
    name="tiny",
    segment=8,
    attention_lengths=(8, 20),
    repeats=3,
    mem_len=12,
    token_repeats=4,
    streams=(1, 3),
    consecutive=30,
    growing_positions=(0, 5, 40),
    training_batch=2,
    texts=40,
    alone=10,
    model=ModelConfig(layers=2, d_model=16, heads=2, head_dim=4, d_ff=24, vocab_size=256),
)


@pytest.fixture(scope="module", autouse=True)
def kernel_of_benchmarks(no_kernel: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of their own for the kernels that benchmarks build, so that the tests after them find none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_limits() -> Iterator[None]:
    """The limits of the machine are measured in a moment: four seconds for each command are too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "READ_BYTES", 1 << 20)
        patch.setattr(measure, "cache_bytes", lambda: 0)
        patch.setattr(measure, "MATRIX", 64)
        patch.setattr(measure, "REST", 0)
        patch.setattr(machine, "busy_cpus", lambda: 0.0)
        yield


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchmarkConfig]:
    """The configuration `tiny`, with one thread."""
    monkeypatch.setitem(CONFIGS, TINY.name, TINY)
    monkeypatch.setattr(OPTIONS["config"], "type", click.Choice(list(CONFIGS)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TINY
    torch.set_num_threads(threads)


@pytest.fixture
def instant(tiny: BenchmarkConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case `decode` without measuring: one row, in a moment."""
    time = Timing(median=2.0, fastest=1.0, slowest=3.0, repeats=4)
    row = steps.Row(
        mem_len=8,
        batch=1,
        tokens=1,
        operators="standard",
        onnxruntime=time,
        pytorch=time,
        num_bytes=1,
        multiply_adds=1,
        ratio=1.0,
    )
    monkeypatch.setattr(steps, "DECODE", dataclasses.replace(steps.DECODE, run=lambda job: [row]))
