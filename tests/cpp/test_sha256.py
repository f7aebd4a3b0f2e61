"""Hashes by the processor's instructions, and without them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.cpp.program import CPP, STRICT


def test_hashes_are_those_of_python(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path / "sha256"
    command = ["g++", *STRICT, "-O1", f"-I{CPP}", Path(__file__).with_name("sha256.cpp"), "-o", program]
    subprocess.run(command, check=True)
    data = np.random.default_rng(0).bytes(100_001)
    *hashes, verdict = (
        subprocess.run([program], input=data, capture_output=True).stdout.decode().split("\n")[:-1]
    )
    parts = [*(data[:size] for size in range(201)), data]
    assert hashes == [hashlib.sha256(part).hexdigest() for part in parts]
    assert verdict in ("equal", "no instructions")
