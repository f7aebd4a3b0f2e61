"""What a machine says of itself: the version of NVIDIA's driver, from two places."""

from __future__ import annotations

import ctypes
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


BROKEN = (nvml(b"", starts=18), nvml(b"1.2", fault=3), nvml(b"\x1b[2J"), SimpleNamespace())
# NVML, or None without it; what the kernel's module says; the version.
CASES: list[tuple[Any, str | None, str | None]] = [
    (nvml(b"580.65.06"), LINE, "580.65.06"),
    (None, LINE, "535.129.03"),
    (None, OPEN, "580.65.06"),
    *((library, LINE, "535.129.03") for library in BROKEN),
    *((None, text, None) for text in (None, "", "NVRM version: none\n", "GCC version: 12.2.0\n")),
]


def test_the_driver_version_comes_from_nvml_or_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (library, text, version) in enumerate(CASES):

        def load(name: str, library: Any = library) -> Any:
            if library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        path = tmp_path / str(number)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(machine, "NVIDIA_MODULE", path)
        assert driver_version() == version, number
