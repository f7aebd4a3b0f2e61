"""Artefacts on a GPU with ONNX Runtime: buffers and refusals, over a stand-in for the GPU (see
`tests/host_gpu.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import check, load_memory, open_session, save_memory
from runtimes.base import progress
from runtimes.base.errors import StreamError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORMS
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.sessions.ort_gpu.session import OrtGpuSession
from tests import host_gpu
from xl_export.artefact.export import export


@pytest.mark.parametrize("form", FORMS)
def test_single_tokens_are_captured_once_in_each_direction(
    artefacts: dict[str, Path], launched: list[int], form: str
) -> None:
    session = host_gpu.opened(artefacts[form])
    token, memory = np.zeros((1, 1), np.int64), session.start(1)
    session.captures = True
    for _ in range(6):
        session.predict(token, memory)
    session.predict(np.zeros((1, 3), np.int64), memory)
    session.predict(token, memory)
    # Captured after the second step. The ring has one direction; the segment of three turns the others.
    expected = {"ring": [-1, -1, 1, 1, 1, 1, -1, 1]}.get(form, [-1, -1, -1, 1, 2, 1, -1, 1])
    assert launched == expected
    session.predict(token, other := memory.copy())
    session.captures = False
    session.predict(token, other)
    assert launched[-2:] == [-1, -1]  # a fork has graphs of its own, and begins without one


def test_a_ring_has_one_buffer_and_other_forms_two(artefacts: dict[str, Path], launched: list[int]) -> None:
    for form in FORMS:
        session = host_gpu.opened(artefacts[form])
        memory, token, seen = session.start(1), np.zeros((1, 1), np.int64), []
        for _ in range(4):
            session.step(token, memory)
            seen.append(tuple(array.value.data_ptr() for array in memory.tensors.values()))  # type: ignore[attr-defined]
        assert len(set(seen)) == (1 if form == "ring" else 2)
        assert seen[0] == seen[2]


@pytest.mark.usefixtures("launched")
def test_a_saved_stream_moves_to_the_cpu_and_back(artefacts: dict[str, Path], tmp_path: Path) -> None:
    device = host_gpu.opened(artefacts["ring"])
    cpu = OrtSession.open(artefacts["ring"], threads=1, kernel="standard")
    tokens = np.arange(5)[None]
    _, memory = device.step(tokens, device.start(1))
    for one, other in ((device, cpu), (cpu, device)):
        save_memory(memory, tmp_path / "stream")
        moved = load_memory(tmp_path / "stream", other)
        np.testing.assert_allclose(one.step(tokens, memory)[0], other.step(tokens, moved)[0], atol=1e-5)
        memory = moved


@pytest.mark.parametrize(("form", "ways"), [("ring", 2), ("shift", 3)])
def test_check_compares_captured_graphs_too_and_names_the_device(
    artefacts: dict[str, Path], launched: list[int], form: str, ways: int
) -> None:
    report = check(artefacts[form], device="cuda")
    assert report.passed
    assert (report.computed_by, report.kernel) == ("ONNX Runtime, CUDA on cuda", "cuda")
    assert (report.paths, report.missing) == (ways, ())


def test_steps_that_nothing_can_compare_are_not_captured(
    make_run: Callable[..., Path], launched: list[int], tmp_path: Path
) -> None:
    """Under the mask `full` answers depend on how tokens are cut, so a reference is not fed singly."""
    run = make_run(rule=MemoryRule(mem_len=16, segment=8, mask="full"))
    session = host_gpu.opened(export(run, tmp_path / "artefact", memory="shift"))
    token, memory = np.zeros((1, 1), np.int64), session.start(1)
    for _ in range(6):
        session.predict(token, memory)
    assert set(launched) == {-1}


def test_a_failed_copy_is_named_and_auto_uses_the_cpu(
    artefacts: dict[str, Path],
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ort = pytest.importorskip("onnxruntime")

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA failure 700: an illegal memory access\nmore")

    token = np.zeros((1, 1), np.int64)
    session = host_gpu.opened(artefacts["ring"])
    with monkeypatch.context() as patch:
        patch.setattr(ort.OrtValue, "update_inplace", broken)
        to_device = r"could not copy .* to the device \(CUDA failure 700: [^\n]*; open"
        with pytest.raises(StreamError, match=to_device):
            session.predict(token, session.start(1))
        monkeypatch.setattr(progress, "_said", set())
        capsys.readouterr()
        assert isinstance(open_session(artefacts["ring"], threads=1), OrtSession)
        assert "computing on the CPU, because cuda was tried" in capsys.readouterr().err
    session.predict(token, memory := session.start(1))
    with monkeypatch.context() as patch:
        patch.setattr(ort.OrtValue, "numpy", broken)
        with pytest.raises(StreamError, match=r"could not copy .* from the device"):
            memory.copy()
    session = host_gpu.opened(artefacts["ring"])
    monkeypatch.setattr(OrtGpuSession, "io_binding", broken)
    with pytest.raises(StreamError, match="could not bind the arrays of a step"):
        session.predict(token, session.start(1))


def test_graphs_of_a_deleted_memory_are_released(artefacts: dict[str, Path], launched: list[int]) -> None:
    session, token = host_gpu.opened(artefacts["shift"]), np.zeros((1, 1), np.int64)
    memory = session.start(1)
    for _ in range(5):
        session.predict(token, memory)
    assert isinstance(session.stream, host_gpu.HostStream)
    assert session.stream.released == []
    del memory
    gc.collect()
    assert sorted(session.stream.released) == [1, 2]


@pytest.mark.usefixtures("launched")
def test_a_graph_of_fixed_sizes_is_fed_what_it_takes(run: Path, tmp_path: Path) -> None:
    report = check(export(run, tmp_path / "a", rows=1), device="cuda")
    assert report.passed
    assert not report.missing
