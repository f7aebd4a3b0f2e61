"""A stand-in for ONNX Runtime's CUDA provider: its CPU provider, with the buffers in host memory.

All of `runtimes/sessions/ort_gpu` runs as with CUDA, except the provider's own kernels and the driver's
stream: buffers of ONNX Runtime, two sets in turn, a binding for each direction, captured steps. `tests/cuda`
runs the real provider and stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.contract.device import Device
from runtimes.sessions import artefact
from runtimes.sessions.open import open_session
from runtimes.sessions.ort_gpu import provider, session
from runtimes.sessions.ort_gpu.provider import CudaProvider
from runtimes.sessions.ort_gpu.stream import Stream


class HostStream(Stream):
    """Does at once what is put on it, except downloads. `launched`: see `install`."""

    def __init__(self, launched: list[int]) -> None:
        self.launched = launched
        self.released: list[int] = []
        self._graphs = 0
        self._downloads: list[Callable[[], Any]] = []

    def enter(self) -> None:
        pass

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.full(num_bytes, 255, np.uint8)

    def upload(self, target: int, source: np.ndarray) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, source: int) -> None:
        self._downloads.append(lambda: ctypes.memmove(target.ctypes.data, source, target.nbytes))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def clear(self, target: int, num_bytes: int) -> None:
        ctypes.memset(target, 0, num_bytes)

    def synchronize(self) -> None:
        while self._downloads:
            self._downloads.pop(0)()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self._graphs += 1
        number = self._graphs

        def launch() -> None:
            enqueue()
            self.launched[-1] = number

        weakref.finalize(launch, self.released.append, number).atexit = False
        return launch


class HostProvider(CudaProvider):
    """The CPU provider in the place of CUDA's."""

    name, memory = "CPUExecutionProvider", "cpu"

    def __init__(self, launched: list[int]) -> None:
        self.launched = launched

    def options(self, device: Device) -> dict[str, str]:
        return {}

    def stream(self, device: Device) -> Stream:
        return HostStream(self.launched)

    def on_stream(self, stream: Stream, *, captured: bool) -> dict[str, str]:
        return {}

    def fault(self, ort: Any) -> str | None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts the stand-in in the place of CUDA; the list gets the number of each step's CUDA graph, or -1."""
    launched: list[int] = []
    launch = session.OrtGpuSession.launch

    def noted(self: session.OrtGpuSession, io: Any) -> None:
        launched.append(-1)
        launch(self, io)

    monkeypatch.setattr(provider, "PROVIDER", HostProvider(launched))
    monkeypatch.setattr(artefact, "CUDA_PROVIDER", HostProvider.name)
    monkeypatch.setattr(session.OrtGpuSession, "launch", noted)
    return launched


def opened(folder: Path) -> session.OrtGpuSession:
    """The session over an artefact on the stand-in."""
    found = open_session(folder, device="cuda", threads=1)
    assert isinstance(found, session.OrtGpuSession)
    return found
