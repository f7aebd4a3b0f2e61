"""The fused operator in ONNX Runtime, under the sanitizers: an answer or an error, and never a signal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu.library import FOLDER

WORKER = Path(__file__).with_name("operator_worker.py")
ROOT = Path(__file__).parents[2]
CASES = 500  # of one process
FLAGS = ("-std=c++17", "-O1", "-g1", "-w", "-fwrapv", "-march=native", "-shared", "-fPIC")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The operator compiled with sanitizers, and the libraries that Python must load before anything else."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    library = tmp_path_factory.mktemp("sanitized") / "fused.so"
    ended = subprocess.run(
        ["g++", *FLAGS, *SANITIZERS, str(FOLDER / "library.cpp"), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    if ended.returncode and ("asan" in ended.stderr or "bad value" in ended.stderr):
        pytest.skip("g++ has no sanitizers here, or not this processor")
    assert ended.returncode == 0, ended.stderr
    # With the C++ library after the sanitizer's, the sanitizer finds the functions that throw exceptions.
    return library, f"{_found('libasan.so')} {_found('libstdc++.so.6')}"


def _found(name: str) -> str:
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_inputs_that_do_not_fit_never_touch_memory(
    sanitized: tuple[Path, str], rounds: Callable[[str], Iterator[int]]
) -> None:
    library, preloaded = sanitized
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    computed = refused = 0
    for number in rounds("operator"):
        seed = number * CASES
        ended = subprocess.run(
            [sys.executable, str(WORKER), str(library), str(seed), str(CASES)],
            capture_output=True,
            text=True,
            env=environment,
        )
        lines = ended.stdout.splitlines()
        assert ended.returncode == 0, (
            f"SOAK_SEED={number}: exit code {ended.returncode} in case {lines[-1:]}; repeat it with "
            f"`operator_worker.py LIBRARY CASE 1`.\n{ended.stderr[-4000:]}"
        )
        done = [int(part.split()[0]) for part in lines[-1].split(", ")]
        computed, refused = computed + done[0], refused + done[1]
        assert done[0] > CASES // 10, ended.stdout
        assert done[1] > CASES // 10, ended.stdout
        print(f"soak: operator, {computed} computed, {refused} refused", flush=True)
