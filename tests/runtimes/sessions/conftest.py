"""A stand-in for ONNX Runtime's provider for CUDA, for the tests that ask for it."""

from __future__ import annotations

import pytest

from tests import host_gpu


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the CUDA graph of each step over the stand-in (see `tests/host_gpu.py`)."""
    return host_gpu.install(monkeypatch)
