"""What a machine says of itself: the version of NVIDIA's driver, from two places."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtimes.base import machine
from runtimes.base.machine import driver_version

LINE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\nGCC version: 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)\n"


def nvml(version: bytes, *, starts: int = 0, fault: int = 0) -> Any:
    def ask(text: Any, size: int) -> int:
        assert size == len(text)
        text.value = version
        return fault

    return SimpleNamespace(nvmlInit_v2=lambda: starts, nvmlSystemGetDriverVersion=ask, nvmlShutdown=lambda: 0)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str | None], str | None]:
    """The version where NVML is this, or is not installed (None), and the kernel's module says this."""

    def version(library: Any, text: str | None) -> str | None:
        def load(name: str) -> Any:
            assert name == "libnvidia-ml.so.1"
            if library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        path = tmp_path / "version"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(machine, "NVIDIA_MODULE", path)
        return driver_version()

    return version


def test_the_driver_version_comes_from_nvml_or_the_kernel(
    given: Callable[[Any, str | None], str | None],
) -> None:
    assert given(nvml(b"580.65.06"), LINE) == "580.65.06"
    assert given(None, LINE) == "535.129.03"
    assert given(None, OPEN) == "580.65.06"
    for broken in (nvml(b"", starts=18), nvml(b"1.2", fault=3), nvml(b"\x1b[2J"), SimpleNamespace()):
        assert given(broken, LINE) == "535.129.03"


def test_an_unknown_driver_has_no_version(
    given: Callable[[Any, str | None], str | None],
) -> None:
    for text in (None, "", "NVRM version: none\n", "GCC version: 12.2.0\n"):
        assert given(None, text) is None
