"""Which GPUs a CUDA library has code for; `tests/cuda` reads ONNX Runtime's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.sessions.ort_gpu.machine_code import Code, codes_of
from tests.cuda_library import write_library

TURING, AMPERE, PTX_OF_9, HOPPER = (
    Code(75, ptx=False, specific=False),
    Code(86, ptx=False, specific=False),
    Code(90, ptx=True, specific=False),
    Code(90, ptx=False, specific=True),
)


def test_every_container_of_a_library_is_read(tmp_path: Path) -> None:
    library = write_library(tmp_path / "library.so", [HOPPER], [TURING, AMPERE, HOPPER], [PTX_OF_9])
    assert codes_of(library) == (TURING, AMPERE, HOPPER, PTX_OF_9)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF\x02\x01" + bytes(200)])
def test_nothing_is_known_of_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.so").write_bytes(content)
    assert codes_of(tmp_path / "other.so") == codes_of(tmp_path / "nosuch.so") == ()


def test_nothing_is_known_of_a_damaged_library(tmp_path: Path) -> None:
    whole = write_library(tmp_path / "whole.so", [TURING, HOPPER]).read_bytes()
    for at in range(0, len(whole), 8):  # every number of 8 bytes is damaged once, and the file is cut there
        for number, damaged in enumerate((bytes(8), b"\xff" * 8)):
            library = tmp_path / f"{at}-{number}.so"
            library.write_bytes(whole[:at] + damaged + whole[at + 8 :])
            codes_of(library)
        library = tmp_path / f"{at}.so"
        library.write_bytes(whole[:at])
        assert codes_of(library) == ()


@pytest.mark.parametrize(
    ("code", "runs_on", "not_on"),
    [
        (AMPERE, (86, 89), (75, 80, 90, 120)),
        (HOPPER, (90,), (86, 91, 100)),
        (PTX_OF_9, (90, 100, 121), (89,)),
    ],
)
def test_code_runs_on_its_own_and_on_some_later_gpus(
    code: Code, runs_on: tuple[int, ...], not_on: tuple[int, ...]
) -> None:
    assert [code.runs_on(gpu) for gpu in runs_on + not_on] == [True] * len(runs_on) + [False] * len(not_on)
