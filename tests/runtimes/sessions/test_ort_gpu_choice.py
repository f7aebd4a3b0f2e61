"""Which device ONNX Runtime takes, and the sentences for one that it cannot (see `tests/host_gpu.py`)."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtimes import Memory, open_session
from runtimes.base import progress
from runtimes.base.errors import ArtefactError, ConfigError, MissingPackageError
from runtimes.contract.device import Device
from runtimes.contract.engine import Gpu
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.sessions.ort_gpu import driver, packages, provider
from runtimes.sessions.ort_gpu.driver import DriverFacts
from runtimes.sessions.ort_gpu.loading import elsewhere, of_shapes_elsewhere
from runtimes.sessions.ort_gpu.machine_code import Code
from runtimes.sessions.ort_gpu.session import OrtGpuSession
from runtimes.sessions.ort_gpu.stream import Stream
from tests import host_gpu
from tests.cuda_library import write_library

ABSENT = DriverFacts(fault="no NVIDIA driver is installed (libcuda.so.1 cannot be loaded)")


def test_conflicting_packages_are_named_also_by_auto(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ort = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(progress, "_said", set())
    open_session(artefacts["ring"], threads=1)
    assert capsys.readouterr().err == ""  # who has installed the package for the CPU is told nothing
    monkeypatch.setattr(packages, "both_installed", lambda: True)
    open_session(artefacts["ring"], threads=1, device="cpu")
    assert capsys.readouterr().err == ""
    assert isinstance(open_session(artefacts["ring"], threads=1), OrtSession)
    assert capsys.readouterr().err.startswith(
        "computing on the CPU, because onnxruntime and onnxruntime-gpu are both installed"
    )


def test_auto_uses_a_device_with_right_answers_and_reports_it(
    artefacts: dict[str, Path],
    launched: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_said", set())  # another test of this process may have had the sentence
    assert isinstance(open_session(artefacts["shift"], threads=1), OrtGpuSession)
    assert "computing with ONNX Runtime, CUDA on cuda" in capsys.readouterr().err
    assert max(launched) == 2  # the trial has captured both directions


def test_auto_rejects_a_device_with_wrong_answers_and_reports_why(
    artefacts: dict[str, Path],
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = OrtGpuSession.run

    def wrong_in_a_graph(self: OrtGpuSession, inputs: dict, outputs: dict, memory: Memory) -> None:
        run(self, inputs, outputs, memory)
        if launched[-1] == 2:  # only the second direction's graph is wrong
            outputs["logits"][...] = 0

    monkeypatch.setattr(OrtGpuSession, "run", wrong_in_a_graph)
    assert isinstance(open_session(artefacts["shift"], threads=1), OrtSession)
    said = capsys.readouterr().err
    assert said.startswith("computing on the CPU, because cuda was tried and cannot be used")
    assert "differs from the reference" in said
    assert said.count("\n") == 1
    open_session(artefacts["shift"], threads=1)
    assert capsys.readouterr().err == ""  # once is enough


def test_a_provider_left_out_is_an_error_with_the_reason(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As onnxruntime-gpu does without a driver: the package lists CUDA, a session then has the CPU alone."""
    ort = pytest.importorskip("onnxruntime")
    create = ort.InferenceSession

    def left_out(graph: bytes, options: object, **asked: object) -> object:
        return create(graph, options, providers=["CPUExecutionProvider"])

    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: available)
    monkeypatch.setattr(ort, "InferenceSession", left_out)
    monkeypatch.setattr(provider, "ask_driver", lambda: ABSENT)
    with pytest.raises(
        MissingPackageError, match=r"device is cuda .* no NVIDIA driver is installed .*; install the driver"
    ):
        open_session(artefacts["ring"], device="cuda")
    assert isinstance(open_session(artefacts["ring"]), OrtSession)
    assert "computing on the CPU, because no NVIDIA driver is installed" in capsys.readouterr().err
    # With a driver, the linker's own words about the first library that is missing.
    monkeypatch.setattr(provider, "ask_driver", lambda: DriverFacts(cuda=(99, 0)))
    monkeypatch.setattr(
        provider, "_unloadable", lambda _: "libcublasLt.so.13: cannot open shared object file"
    )
    with pytest.raises(MissingPackageError, match=r"libcublasLt.so.13.*run `pip install 'onnxruntime-gpu\["):
        open_session(artefacts["ring"], device="cuda")


def test_an_old_driver_or_a_missing_gpu_is_named(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(ort, "cuda_version", "13.0", raising=False)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(provider, "ask_driver", lambda: DriverFacts(cuda=(12, 8)))
    fault = provider.PROVIDER.fault(ort)
    assert fault is not None
    assert "serves CUDA 12.8 and onnxruntime" in fault
    gpu = host_gpu_of_one()
    monkeypatch.setattr(provider, "ask_driver", lambda: gpu)
    with pytest.raises(MissingPackageError, match="this machine has 1 GPU, which are counted from 0"):
        open_session(artefacts["ring"], device="cuda:1")


def test_a_gpu_without_code_is_named_by_auto_and_refused(
    artefacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With two GPUs of which the first cannot be used, its number decides."""
    ort = pytest.importorskip("onnxruntime")
    library = write_library(tmp_path / "library.so", [Code(86, ptx=False, specific=False)])
    gpus = [Gpu(name="B200", compute_capability="10.0"), Gpu(name="A10", compute_capability="8.6")]
    monkeypatch.setattr(provider.CudaProvider, "file", lambda self, ort: library)
    monkeypatch.setattr(provider, "_unloadable", lambda _: None)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(progress, "_said", set())
    fault = "B200 has compute capability 10.0, and onnxruntime .* has code for 8.6 only"
    for found in (gpus[:1], gpus):
        driver = DriverFacts(gpus=tuple(found), cuda=(13, 0))
        monkeypatch.setattr(provider, "ask_driver", lambda driver=driver: driver)
        with pytest.raises(MissingPackageError, match=f"device is cuda and .*{fault}"):
            open_session(artefacts["ring"], device="cuda")
        assert isinstance(open_session(artefacts["ring"], threads=1), OrtSession)
        assert re.match(f"computing on the CPU, because .*{fault}", capsys.readouterr().err)
    provider.PROVIDER.refuse_missing(ort, Device("cuda", 1))
    assert provider.PROVIDER.fault(ort) is None


def test_the_driver_tells_its_gpus_and_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    serves_13_0 = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: setattr(count._obj, "value", 1),
        cuDriverGetVersion=lambda number: setattr(number._obj, "value", 13000),
        cuDeviceGet=lambda device, number: 0,
        cuDeviceGetName=lambda name, size, device: setattr(name, "value", b"A GPU"),
        cuDeviceGetAttribute=lambda value, attribute, device: setattr(value._obj, "value", attribute - 70),
    )
    monkeypatch.setattr(driver, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: serves_13_0}))
    monkeypatch.setattr(driver, "driver_version", lambda: "580.65.06")
    assert driver.ask_driver() == DriverFacts(
        gpus=(Gpu(name="A GPU", compute_capability="5.6"),), cuda=(13, 0), version="580.65.06"
    )


def host_gpu_of_one() -> DriverFacts:
    from tests.fake_gpu import GPU

    return DriverFacts(gpus=(GPU,), cuda=(13, 0))


def test_nodes_on_another_device_are_named_with_a_fix(
    artefacts: dict[str, Path], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = host_gpu.opened(artefacts["ring"])
    assert elsewhere(session._session, "CPUExecutionProvider") == ""
    others = elsewhere(session._session, "CUDAExecutionProvider")
    assert "TensorScatter" in others
    assert others.startswith("77 of 77 nodes (Add, And, Attention")
    assert of_shapes_elsewhere(session._session, "CPUExecutionProvider") == ""
    assert of_shapes_elsewhere(session._session, "CUDAExecutionProvider") == others
    assert of_shapes_elsewhere(object(), "CUDAExecutionProvider") == "", "ONNX Runtime 1.23 names no nodes"

    # ONNX Runtime refuses such a graph where CUDA graphs are asked for, and loads it where they are not.
    def refused(self: host_gpu.HostProvider, stream: Stream, *, captured: bool) -> dict[str, str]:
        if captured:
            raise RuntimeError("all compute graph nodes have not been partitioned to the CUDA EP")
        return {}

    monkeypatch.setattr(host_gpu.HostProvider, "on_stream", refused)
    with pytest.raises(ArtefactError, match=r"puts 0 of 77 nodes"):  # by the stand-in all are in place
        host_gpu.opened(artefacts["ring"])
    named = "runtimes.sessions.ort_gpu.loading.elsewhere"
    monkeypatch.setattr(named, lambda *_, refused: "18 of 77 nodes (Reshape)" if refused else "")
    with pytest.raises(ArtefactError, match=r"puts 18 of 77 nodes \(Reshape\) elsewhere.*--memory shift"):
        host_gpu.opened(artefacts["ring"])


@pytest.mark.parametrize(
    ("kind", "device", "message"),
    [
        ("ring", "mps", "is an artefact, which ONNX Runtime computes; give cpu or cuda"),
        ("ring", "tensorrt", "or build an engine of it with `xl-export build`"),
        ("run", "tensorrt", "is a run, which PyTorch computes on cpu, cuda or mps"),
    ],
)
def test_a_device_that_cannot_compute_a_folder_is_refused(
    artefacts: dict[str, Path], run: Path, kind: str, device: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_session(artefacts.get(kind, run), device=device)
