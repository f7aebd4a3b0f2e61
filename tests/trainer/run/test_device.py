"""Runs on another device than the CPU, over a stand-in that is the CPU by another name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.errors import MissingPackageError
from runtimes.contract.device import Device
from trainer.run import session as on
from trainer.run.session import TorchSession


class Stand(Device):
    """A GPU that PyTorch takes for the CPU."""

    def __str__(self) -> str:
        return "cpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "_unusable", lambda _: None)
    monkeypatch.setattr(on, "Device", Stand)


def test_a_run_answers_alike_on_another_device(run: Path, gpu: None) -> None:
    cpu, moved = open_session(run, device="cpu"), open_session(run)
    assert isinstance(moved, TorchSession)
    assert moved.device.kind == "cuda"
    assert moved.with_rule(moved.rule).device is moved.device
    tokens, lengths = np.arange(16).reshape(2, 8), np.array([8, 3])
    for method in ("step", "predict"):
        expected, there = getattr(cpu, method)(tokens, cpu.start(2), lengths=lengths)
        mine, here = getattr(moved, method)(tokens, moved.start(2), lengths=lengths)
        np.testing.assert_array_equal(mine, expected)
        for name, array in there.tensors.items():
            np.testing.assert_array_equal(here.tensors[name], array)


def test_a_device_with_other_answers_is_not_used(
    run: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move = TorchSession._moved
    monkeypatch.setattr(TorchSession, "_moved", lambda self, device: spoilt(move(self, device)))
    session = open_session(run)
    assert isinstance(session, TorchSession)
    assert session.computed_by == "PyTorch"
    assert (
        "on the CPU, because cpu is not usable: its answers differ from the CPU's" in capsys.readouterr().err
    )


def test_a_failing_gpu_is_skipped_or_refused(
    run: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: TorchSession, device: Device) -> TorchSession:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nsee the documentation")

    monkeypatch.setattr(TorchSession, "_moved", full)
    assert open_session(run).computed_by == "PyTorch"
    assert "is not usable: CUDA out of memory. Tried to allocate 2 GiB\n" in capsys.readouterr().err
    with pytest.raises(MissingPackageError, match="cannot use it: CUDA out of memory"):
        open_session(run, device="cuda")


def spoilt(session: TorchSession) -> TorchSession:
    next(session.model.parameters()).data.mul_(1.5)
    return session


def test_an_unusable_device_is_refused_with_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingPackageError, match="is built without CUDA; install what is missing"):
        open_session(run, device="cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MissingPackageError, match=r"device is cuda:1 .* this machine has 1 of them"):
        open_session(run, device="cuda:1")
