"""What `xl-export devices` says of a machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtimes.base.startup import load_onnxruntime
from runtimes.cli import devices
from runtimes.cli.devices import DeviceReport, hints, list_devices
from runtimes.contract.device import OF_ARTEFACTS
from runtimes.sessions.ort_gpu import provider
from runtimes.sessions.ort_gpu.driver import DriverFacts
from runtimes.sessions.ort_gpu.machine_code import Code
from tests import fake_gpu
from tests.cuda_library import write_library

ABSENT = DriverFacts(fault="no NVIDIA driver is installed (libcuda.so.1 cannot be loaded)")
WITH_GPU = DriverFacts(gpus=(fake_gpu.GPU,), cuda=(13, 0))


def described(
    monkeypatch: pytest.MonkeyPatch, driver: DriverFacts, *packages: str, at: Path = Path("/nowhere")
) -> dict[str, DeviceReport]:
    """The devices of artefacts, for a driver and an onnxruntime with these providers, installed in `at`."""
    for module in (devices, provider):
        monkeypatch.setattr(module, "ask_driver", lambda: driver)
    monkeypatch.setattr(devices, "_torch", lambda kind: "PyTorch")  # its import takes seconds
    ort = SimpleNamespace(
        __version__="1.31.1",
        __file__=str(at / "onnxruntime/__init__.py"),
        cuda_version="13.0",
        get_available_providers=lambda: [*packages, "CPUExecutionProvider"],
    )
    monkeypatch.setattr(devices, "load_onnxruntime", lambda: ort)
    return {report.device: report for report in list_devices() if report.computes == "artefacts"}


def test_without_onnx_runtime_everything_is_listed_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described(monkeypatch, ABSENT)
    monkeypatch.setattr(devices, "load_onnxruntime", load_onnxruntime)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = [report for report in list_devices() if report.computes == "artefacts"]
    assert {report.device for report in found} == set(OF_ARTEFACTS)
    for report in found:
        assert not report.usable
        assert report.sentence.startswith("ONNX Runtime is not installed; run `pip install 'onnxruntime>=1.")


def test_each_reason_why_cuda_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = described(monkeypatch, WITH_GPU)["cuda"]
    assert "is built without CUDA; run `pip uninstall" in without.sentence
    no_driver = described(monkeypatch, ABSENT, "CUDAExecutionProvider")["cuda"]
    assert no_driver.sentence == f"{ABSENT.fault}; install the driver of this machine's GPU."
    no_library = described(monkeypatch, WITH_GPU, "CUDAExecutionProvider")["cuda"]
    assert "/nowhere/onnxruntime/capi/libonnxruntime_providers_cuda.so: cannot" in no_library.sentence
    assert not any(report.usable for report in (without, no_driver, no_library))


def test_what_can_be_used_is_named_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_unloadable", lambda _: None)
    found = described(monkeypatch, WITH_GPU, "CUDAExecutionProvider")
    assert found["cuda"].usable
    assert found["cuda"].sentence == "CUDA of ONNX Runtime 1.31.1 on Fake RTX (8.9)."
    assert found["cpu"].usable


def test_a_gpu_for_which_the_provider_has_no_code_is_not_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "_unloadable", lambda _: None)
    file = provider.PROVIDER.file(SimpleNamespace(__file__=tmp_path / "onnxruntime/__init__.py"))
    file.parent.mkdir(parents=True)
    write_library(file, [Code(89, ptx=False, specific=False), Code(90, ptx=False, specific=True)])
    orin = dataclasses.replace(fake_gpu.GPU, name="Orin", compute_capability="8.7")
    for gpus, usable in (((orin,), False), ((orin, fake_gpu.GPU), True)):
        driver = DriverFacts(gpus=gpus, cuda=(13, 0))
        found = described(monkeypatch, driver, "CUDAExecutionProvider", at=tmp_path)["cuda"]
        assert found.usable == usable
        if usable:
            assert found.sentence.endswith("on Fake RTX (8.9).")
        else:
            assert (
                "Orin has compute capability 8.7, and onnxruntime 1.31.1 has code for 8.9 and 9.0 only; "
                in (found.sentence)
            )


def test_engines_need_a_driver_and_conflicting_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(monkeypatch, ABSENT)
    trt = SimpleNamespace(__name__="tensorrt_rtx", __version__="1.7.1")
    monkeypatch.setattr(devices, "load_tensorrt", lambda flavour: trt)
    engines = [report for report in list_devices() if report.computes == "engines"]
    assert [report.usable for report in engines] == [False, False]
    assert f"tensorrt_rtx 1.7.1 is installed, and {ABSENT.fault}; install" in engines[0].sentence
    assert hints() == []
    package = tmp_path / "onnxruntime"
    for name in ("onnxruntime", "onnxruntime_gpu"):
        (tmp_path / f"{name}-1.31.1.dist-info").mkdir()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py"))
    )
    (hint,) = hints()
    assert "onnxruntime and onnxruntime-gpu are both installed" in hint
