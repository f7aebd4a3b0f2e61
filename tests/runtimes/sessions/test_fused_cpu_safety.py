"""The fused operator reads and writes nothing beyond its tensors, and refuses sizes that do not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu.library import FOLDER

DRIVER = Path(__file__).with_name("fused_cpu_driver.cpp")
SANITIZED = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-w",
    "-fwrapv",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiled under sanitizers first, which takes minutes on a busy machine
@pytest.mark.parametrize("processor", ["native", "x86-64"])
def test_random_steps_stay_within_their_tensors(processor: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    command = [
        "g++",
        *SANITIZED,
        f"-march={processor}",
        "-I",
        str(FOLDER),
        str(DRIVER),
        "-o",
        str(tmp_path / "driver"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode and ("asan" in ended.stderr or "bad value" in ended.stderr):
        pytest.skip("g++ has no sanitizers here, or not this processor")
    assert ended.returncode == 0, ended.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    ended = subprocess.run(
        [tmp_path / "driver", "1", "1500"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    computed, refused = (int(part.split()[0]) for part in ended.stdout.split(", "))
    assert computed > 1000
    assert refused > 100
