"""The library with the nodes for `cuda` and the stub libraries under it, for tests of these nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu import build
from tests.cuda.node import ON_CUDA, Sizes, emulated, library_for_cpu
from tests.cuda.stubs import A100, StubGpu, Stubs, built_driver, load_all

SMALL = StubGpu(2, 80, 167936)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build() if ON_CUDA else library_for_cpu(tmp_path_factory.mktemp("library"))


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    loaded = load_all() if ON_CUDA else Stubs(built_driver())
    loaded.set_gpu(SMALL)
    yield loaded
    loaded.set_gpu(A100)


@pytest.fixture
def launches(stubs: Stubs) -> Iterator[list[Sizes]]:
    """Of the nodes, whose tensors are in allocations of their own."""
    with emulated(stubs, stubs.room) as found:
        yield found
