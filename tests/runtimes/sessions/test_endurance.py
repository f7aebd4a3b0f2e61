"""A long stream through a small ring: the same scores as PyTorch to the end, and no memory taken on the
way.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.contract.rule import MemoryRule
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import Kernel, OrtSession
from xl_export.artefact.export import export

STATM = Path("/proc/self/statm")
RULE = MemoryRule(mem_len=48, segment=64)


@pytest.mark.parametrize("kernel", ["standard", "fused"])
@pytest.mark.parametrize(
    "count", [6_400, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_long_stream_neither_drifts_nor_grows(
    kernel: Kernel, count: int, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kernel == "fused":
        if shutil.which("g++") is None:
            pytest.skip("there is no g++ here to build the kernel with")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        fused_cpu.build()
    run = make_run(rule=RULE)
    sessions = [open_session(run), OrtSession.open(export(run, tmp_path / "artefact"), kernel=kernel)]
    memories = [session.start(1) for session in sessions]
    buffers = {name: array.ctypes.data for name, array in memories[1].tensors.items()}
    draw, worst, resident = np.random.default_rng(0), [], []
    for at in range(0, count, RULE.segment):
        tokens = draw.integers(0, sessions[0].vocab.size, (1, RULE.segment + 1))
        scores = [
            s.score(tokens[:, :-1], tokens[:, 1:], memory)[0]
            for s, memory in zip(sessions, memories, strict=True)
        ]
        worst.append(float(np.abs(scores[0] - scores[1]).max()))
        if at % (count // 10) < RULE.segment:
            resident.append(_resident_pages())
    assert max(worst) < 1e-4
    assert max(worst[-len(worst) // 10 :]) < 3 * max(worst[: len(worst) // 10])  # no drift
    assert memories[1].positions[0] >= count
    assert {name: array.ctypes.data for name, array in memories[1].tensors.items()} == buffers
    # A leak grows at every step. One jump is another test's: threads and caches of the process are its too.
    growth = np.diff(resident[1:])
    assert np.median(growth) * len(growth) < 256, resident  # pages of 4 kB


def _resident_pages() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) if STATM.is_file() else 0
