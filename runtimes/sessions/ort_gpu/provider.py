"""ONNX Runtime's provider for NVIDIA GPUs: how it is requested, and what it needs."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runtimes.base.errors import MissingPackageError, first_line
from runtimes.base.ranges import counted
from runtimes.contract.device import Device
from runtimes.contract.spec import Spec
from runtimes.sessions.ort_gpu.driver import ask_driver
from runtimes.sessions.ort_gpu.machine_code import codes_of
from runtimes.sessions.ort_gpu.packages import CUDA_PROVIDER, fault_of_both, install_gpu
from runtimes.sessions.ort_gpu.stream import Stream

if TYPE_CHECKING:
    from runtimes.contract.engine import Gpu

LIBRARY = "libonnxruntime_providers_cuda.so"  # in ONNX Runtime's package
INSTALL_DRIVER = "install the driver of this machine's GPU"
INSTALL_LIBRARIES = "run `pip install 'onnxruntime-gpu[cuda,cudnn]'`"


class CudaProvider:
    """ONNX Runtime's own kernels for CUDA."""

    name: ClassVar[str] = CUDA_PROVIDER
    memory: ClassVar[str] = "cuda"  # the name of its memory in ONNX Runtime

    def options(self, device: Device) -> dict[str, str]:
        """The options of the provider."""
        # Off by default: TensorFloat-32 rounds factors to 10 bits, which misses the tolerance of fp32 by far.
        return {"device_id": str(device.index), "use_tf32": str(int(device.tf32))}

    def stream(self, device: Device) -> Stream:
        """A new stream for a session to compute on, whose steps can be captured."""
        return Stream(device.index)

    def on_stream(self, stream: Stream, *, captured: bool) -> dict[str, str]:
        """More options, for a stream from `stream`.

        captured: whether steps are captured. ONNX Runtime then refuses a graph with a node that computes
        elsewhere.
        """
        chosen = {"user_compute_stream": str(stream.address)}
        return chosen | ({"enable_cuda_graph": "1"} if captured else {})

    def fault(self, ort: Any) -> str | None:
        """Why ONNX Runtime does not have this provider here, and how to fix it, as parts of one sentence.

        None if it has it and its library loads; whether it starts shows when a session is opened.
        """
        if self.name not in ort.get_available_providers():
            return _not_in_package(ort)
        if fault := _fault_of_driver(ort):
            return fault
        self.preload(ort)
        if missing := _unloadable(self.file(ort)):
            of_driver = "libcuda." in missing or "libnvidia" in missing
            return f"{missing}; {INSTALL_DRIVER if of_driver else INSTALL_LIBRARIES}"
        faults = [self.without_code(ort, gpu) for gpu in ask_driver().gpus]
        return faults[0] if faults and all(faults) else None

    def file(self, ort: Any) -> Path:
        """Its library."""
        return Path(ort.__file__).parent / "capi" / LIBRARY

    def without_code(self, ort: Any, gpu: Gpu) -> str | None:
        """Why a GPU cannot run this provider's kernels, and what to do, as parts of one sentence; None if it
        can, or if its library does not tell.
        """
        codes = codes_of(self.file(ort))
        if not codes or any(code.runs_on(gpu.capability) for code in codes):
            return None
        *others, last = dict.fromkeys(f"{code.capability / 10:.1f}" for code in codes)
        served = f"{', '.join(others)} and {last}" if others else last
        return (
            f"{gpu.name} has compute capability {gpu.compute_capability}, and onnxruntime {ort.__version__} "
            f"has code for {served} only; build an engine with `xl-export build`, or onnxruntime for this GPU"
        )

    def preload(self, ort: Any) -> None:
        """Loads the CUDA libraries of NVIDIA's packages, if they are installed; what it prints is dropped."""
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            getattr(ort, "preload_dlls", lambda: None)()

    def refuse_missing(self, ort: Any, device: Device) -> None:
        """Raises MissingPackageError if the installed ONNX Runtime does not have this provider, or this
        machine not that GPU.
        """
        if self.name not in ort.get_available_providers():
            raise MissingPackageError(_sentence(device, _not_in_package(ort)))
        if device.index and device.index >= (count := len(ask_driver().gpus)) > 0:
            gpus = f"this machine has {counted(count, 'GPU')}, which are counted from 0"
            raise MissingPackageError(_sentence(device, f"{gpus}; give a smaller number"))
        for gpu in ask_driver().gpus[device.index : device.index + 1]:
            if fault := self.without_code(ort, gpu):
                raise MissingPackageError(_sentence(device, fault))

    def not_started(self, ort: Any, device: Device) -> MissingPackageError:
        """The error for a provider that ONNX Runtime left out of a session, with the reason."""
        unknown = (
            "CUDA did not start though its libraries load, and only ONNX Runtime's log says why; read that "
            "after onnxruntime.set_default_logger_severity(2)"
        )
        return MissingPackageError(_sentence(device, self.fault(ort) or unknown))


PROVIDER = CudaProvider()


def kernels_missing(spec: Spec) -> str:
    """What to do if a node of the graph has no kernel for CUDA, in the imperative."""
    if spec.target == "tensorrt":
        return "export the artefact again"  # its attention may still copy sizes from the CPU
    if spec.circular:
        update = "install onnxruntime-gpu 1.27 or newer, which has every kernel and needs CUDA 13"
        return f"{update}, or export with `xl-export export --memory shift`, which 1.25 runs too"
    return "install onnxruntime-gpu 1.25 or newer"


def _sentence(device: Device, fault: str) -> str:
    return f"device is {device} and ONNX Runtime cannot use it: {fault}, or give --device cpu."


def _not_in_package(ort: Any) -> str:
    if fault := fault_of_both():
        return fault
    if driver := ask_driver().fault:  # who has no GPU should read that before downloading the package
        return f"{driver}; {INSTALL_DRIVER}, and then run {install_gpu()}"
    return f"the installed onnxruntime {ort.__version__} is built without CUDA; run {install_gpu()}"


def _fault_of_driver(ort: Any) -> str | None:
    """Why NVIDIA's driver does not work for ONNX Runtime here, and how to fix it; None if it does."""
    driver = ask_driver()
    if driver.fault:
        return f"{driver.fault}; {INSTALL_DRIVER}"
    needed = str(getattr(ort, "cuda_version", None) or "0")  # "" in a build without CUDA
    major = int(needed.partition(".")[0])
    if driver.cuda[0] < major:
        return (
            f"the NVIDIA driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]} and onnxruntime "
            f"{ort.__version__} needs {major}; update the driver, or run `pip install "
            "'onnxruntime-gpu<1.27'`, which needs 12"
        )
    return None


def _unloadable(library: Path) -> str | None:
    """Why the dynamic linker cannot load a library, in its own words; None if it can."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return first_line(error)
    return None
