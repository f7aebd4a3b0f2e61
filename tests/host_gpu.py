"""A stand-in for ONNX Runtime's CUDA provider: its CPU provider, with the buffers in host memory.

All of `runtimes/sessions/ort_gpu` runs as with CUDA, but for the provider's own kernels and captures: buffers
of ONNX Runtime, two sets in turn, a binding for each direction, the numbers of CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtimes.contract.device import Device
from runtimes.contract.spec import Spec
from runtimes.sessions.open import open_session
from runtimes.sessions.ort_gpu import session
from runtimes.sessions.ort_gpu.providers import PROVIDERS, CudaProvider


class HostProvider(CudaProvider):
    """The CPU provider in the place of CUDA's."""

    name, memory = "CPUExecutionProvider", "cpu"

    def options(self, spec: Spec, device: Device, *, captured: bool) -> dict[str, str]:
        return {}

    def fault(self, ort: Any) -> str | None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts the stand-in in the place of CUDA; the list gets the number of the CUDA graph of each step."""
    launched: list[int] = []
    launch = session.OrtGpuSession.launch

    def noted(self: session.OrtGpuSession, io: Any, graph: int) -> None:
        launched.append(graph)
        launch(self, io, graph)

    monkeypatch.setitem(PROVIDERS, "cuda", HostProvider())
    monkeypatch.setattr(session.OrtGpuSession, "launch", noted)
    return launched


def opened(folder: Path) -> session.OrtGpuSession:
    """The session over an artefact on the stand-in."""
    found = open_session(folder, device="cuda", threads=1)
    assert isinstance(found, session.OrtGpuSession)
    return found
