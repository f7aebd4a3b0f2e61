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

from runtimes import Session, open_session
from runtimes.contract.rule import MemoryRule
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.export import export

STATM = Path("/proc/self/statm")
RULE = MemoryRule(mem_len=48, segment=64)


LONG = 1_000_000  # tokens


@pytest.mark.parametrize(
    "count", [3_200, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_long_stream_neither_drifts_nor_grows(
    count: int, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run(rule=RULE)
    artefact = export(run, tmp_path / "artefact")
    sessions: list[Session] = [open_session(run), OrtSession.open(artefact, kernel="standard")]
    if shutil.which("g++"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        fused_cpu.build()
        sessions.append(OrtSession.open(artefact, kernel="fused"))
    memories = [session.start(1) for session in sessions]
    buffers = [{name: array.ctypes.data for name, array in m.tensors.items()} for m in memories[1:]]
    draw, worst, resident = np.random.default_rng(0), [], []
    for at in range(0, count, RULE.segment):
        tokens = draw.integers(0, sessions[0].vocab.size, (1, RULE.segment + 1))
        truth, *scores = (
            session.score(tokens[:, :-1], tokens[:, 1:], memory)[0]
            for session, memory in zip(sessions, memories, strict=True)
        )
        worst.append(max(float(np.abs(truth - each).max()) for each in scores))
        if at % (count // 10) < RULE.segment:
            resident.append(_resident_pages())
    assert max(worst) < 1e-4
    assert max(worst[-len(worst) // 10 :]) < 3 * max(worst[: len(worst) // 10])  # no drift
    assert memories[1].positions[0] >= count
    assert [{name: array.ctypes.data for name, array in m.tensors.items()} for m in memories[1:]] == buffers
    if count == LONG:  # over few steps, the system and the C library decide which pages are resident
        # A leak grows at every step. One jump is another test's: threads and caches of the process are its.
        growth = np.diff(resident[1:])
        assert np.median(growth) * len(growth) < 256, resident  # pages of 4 kB


def _resident_pages() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) if STATM.is_file() else 0
