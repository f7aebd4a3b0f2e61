"""ONNX Runtime's providers for NVIDIA GPUs: how each is requested, and what it needs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runtimes.base.errors import ConfigError, MissingPackageError, first_line, install
from runtimes.contract.device import Device, Kind
from runtimes.contract.spec import Spec
from runtimes.sessions.ort_gpu.driver import ask_driver
from runtimes.sessions.ort_gpu.machine_code import codes_of
from runtimes.sessions.ort_gpu.stream import Stream

if TYPE_CHECKING:
    from runtimes.contract.engine import Gpu

MOST_ROWS = 16  # of engines that ONNX Runtime builds
INSTALL_GPU = "`pip uninstall -y onnxruntime onnxruntime-gpu`, and then " + install("gpu")
SHIFT = "`xl-export export --memory shift`"
INSTALL_DRIVER = "install the driver of this machine's GPU"
LIBRARIES = "`pip install 'onnxruntime-gpu[cuda,cudnn]'`"


class Provider(ABC):
    """One provider."""

    name: ClassVar[str]  # in ONNX Runtime
    words: ClassVar[str]  # its name for people
    kernel: ClassVar[str]  # its name for scripts
    library: ClassVar[str]  # its file in the package
    memory: ClassVar[str] = "cuda"  # the name of its memory in ONNX Runtime
    builds: ClassVar[bool] = False  # whether it builds an engine when a graph is loaded
    most_rows: ClassVar[int | None] = None  # of a step; None for no limit
    circular: ClassVar[bool] = True  # whether memory may be a ring

    @abstractmethod
    def options(self, spec: Spec, device: Device) -> dict[str, str]:
        """The options of the provider for an artefact."""

    def stream(self, device: Device) -> Stream | None:
        """A new stream for a session to compute on, whose steps can be captured; None if it uses its own."""
        return None

    def on_stream(self, stream: Stream | None, *, captured: bool) -> dict[str, str]:
        """More options, for a stream from `stream`.

        captured: whether steps are captured. ONNX Runtime then refuses a graph with a node that computes
        elsewhere.
        """
        return {}

    def attach(self, ort: Any, options: Any, chosen: Mapping[str, str], device: Device) -> dict[str, Any]:
        """The arguments of ONNX Runtime's session that request this provider and no other."""
        return {"providers": [(self.name, dict(chosen))], "enable_fallback": 0}

    def place(self, ort: Any, device: Device) -> dict[str, Any]:
        """The arguments of ONNX Runtime's arrays that place them in the memory of the device."""
        return {"device_type": self.memory, "device_id": device.index}

    def fault(self, ort: Any) -> str | None:
        """Why ONNX Runtime does not have this provider here, and how to fix it, as parts of one sentence.

        None if it has it and its library loads; whether it starts shows when a session is opened.
        """
        if self.name not in ort.get_available_providers():
            return _not_in_package(ort, self.words)
        if fault := _fault_of_driver(ort):
            return fault
        self.preload(ort)
        if missing := _unloadable(self.file(ort)):
            return f"{missing}; {self.install(missing)}"
        faults = [self.without_code(ort, gpu) for gpu in ask_driver().gpus]
        return faults[0] if faults and all(faults) else None

    def file(self, ort: Any) -> Path:
        """Its library."""
        return Path(ort.__file__).parent / "capi" / self.library

    def without_code(self, ort: Any, gpu: Gpu) -> str | None:
        """Why a GPU cannot run this provider's kernels, and what to do, as parts of one sentence; None if it
        can, or if its library does not tell.
        """
        return None

    def preload(self, ort: Any) -> None:
        """Loads the CUDA libraries of NVIDIA's packages, if they are installed; what it prints is dropped."""
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            getattr(ort, "preload_dlls", lambda: None)()

    def install(self, missing: str) -> str:
        """What to do if a library is missing, in the imperative."""
        return INSTALL_DRIVER if "libcuda." in missing or "libnvidia" in missing else f"run {LIBRARIES}"

    def mend(self, spec: Spec) -> str:
        """What to do if a node of the graph has no kernel here, in the imperative."""
        if spec.target == "tensorrt":
            return "export the artefact again"  # its attention may still copy sizes from the CPU
        update = "install onnxruntime-gpu 1.27 or newer, which has every kernel and needs CUDA 13"
        if spec.circular:
            return f"{update}, or export with {SHIFT}, which 1.25 runs too"
        return "install onnxruntime-gpu 1.25 or newer"

    def refuse_form(self, spec: Spec, device: Device) -> None:
        """Raises ConfigError for a form of memory that the provider cannot compute in any release."""
        if spec.circular and not self.circular:
            raise ConfigError(
                f"device is {device}, and {self.words} has no memory that is written in a circle; export "
                f"with {SHIFT}, or give --device cuda."
            )

    def refuse_missing(self, ort: Any, device: Device) -> None:
        """Raises MissingPackageError if the installed ONNX Runtime does not have this provider, or this
        machine not that GPU.
        """
        if self.name not in ort.get_available_providers():
            raise MissingPackageError(self._sentence(device, _not_in_package(ort, self.words)))
        if device.index and device.index >= (count := len(ask_driver().gpus)) > 0:
            counted = f"this machine has {count} GPU{'s' * (count != 1)}, which are counted from 0"
            raise MissingPackageError(self._sentence(device, f"{counted}; give a smaller number"))
        for gpu in ask_driver().gpus[device.index : device.index + 1]:
            if fault := self.without_code(ort, gpu):
                raise MissingPackageError(self._sentence(device, fault))

    def not_started(self, ort: Any, device: Device) -> MissingPackageError:
        """The error for a provider that ONNX Runtime left out of a session, with the reason."""
        unknown = (
            f"{self.words} did not start though its libraries load, and ONNX Runtime says why in its log "
            "alone; read that after onnxruntime.set_default_logger_severity(2)"
        )
        return MissingPackageError(self._sentence(device, self.fault(ort) or unknown))

    def _sentence(self, device: Device, fault: str) -> str:
        return f"device is {device} and ONNX Runtime cannot use it: {fault}, or give --device cpu."


class CudaProvider(Provider):
    """ONNX Runtime's own kernels for CUDA."""

    name = "CUDAExecutionProvider"
    words = "CUDA"
    kernel = "cuda"
    library = "libonnxruntime_providers_cuda.so"

    def options(self, spec: Spec, device: Device) -> dict[str, str]:
        # Off by default: TensorFloat-32 rounds factors to 10 bits, which misses the tolerance of fp32 by far.
        return {"device_id": str(device.index), "use_tf32": str(int(device.tf32))}

    def without_code(self, ort: Any, gpu: Gpu) -> str | None:
        codes = codes_of(self.file(ort))
        if not codes or any(code.runs_on(gpu.capability) for code in codes):
            return None
        *others, last = dict.fromkeys(f"{code.capability / 10:.1f}" for code in codes)
        served = f"{', '.join(others)} and {last}" if others else last
        return (
            f"{gpu.name} has compute capability {gpu.compute_capability}, and onnxruntime {ort.__version__} "
            f"has code for {served} only; build an engine with `xl-export build`, or onnxruntime for this GPU"
        )

    def stream(self, device: Device) -> Stream | None:
        return Stream(device.index)

    def on_stream(self, stream: Stream | None, *, captured: bool) -> dict[str, str]:
        assert stream is not None
        chosen = {"user_compute_stream": str(stream.address)}
        return chosen | ({"enable_cuda_graph": "1"} if captured else {})


class TensorRtProvider(Provider):
    """An engine of TensorRT that ONNX Runtime builds when it opens the artefact."""

    name = "TensorrtExecutionProvider"
    words = "TensorRT"
    kernel = "tensorrt"
    library = "libonnxruntime_providers_tensorrt.so"
    builds = True
    most_rows = MOST_ROWS
    circular = False
    prefix = "trt"

    def options(self, spec: Spec, device: Device) -> dict[str, str]:
        # The weights were read and verified in memory; TensorRT would look for their file.
        own = {"device_id": str(device.index), "trt_load_user_initializer": "1"}
        return own | profile_shapes(spec, prefix=self.prefix)

    def preload(self, ort: Any) -> None:
        # TensorRT rounds fp32 products to TensorFloat-32 too, and ONNX Runtime has no option against it.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
        super().preload(ort)
        with contextlib.suppress(ImportError, OSError):  # it loads the libraries of TensorRT's package
            import_module("tensorrt")

    def install(self, missing: str) -> str:
        if "nvinfer" in missing or "nvonnxparser" in missing:
            major = missing.partition(".so.")[2][:2].strip(".:")
            return f"install TensorRT {major} (`pip install 'tensorrt=={major}.*'`)"
        return super().install(missing)

    def mend(self, spec: Spec) -> str:
        return f"export with {SHIFT}"


class TensorRtRtxProvider(TensorRtProvider):
    """An engine of TensorRT-RTX that NVIDIA's plugin for ONNX Runtime builds when it opens the artefact."""

    name = "NvTensorRTRTXExecutionProvider"
    words = "TensorRT-RTX"
    kernel = "tensorrt-rtx"
    prefix = "nv"
    package = "onnxruntime_ep_nv_tensorrt_rtx"

    def options(self, spec: Spec, device: Device) -> dict[str, str]:
        return profile_shapes(spec, prefix=self.prefix)  # the GPU is chosen by `attach`

    def attach(self, ort: Any, options: Any, chosen: Mapping[str, str], device: Device) -> dict[str, Any]:
        options.add_provider_for_devices([self._gpu(ort, device)], dict(chosen))
        return {"enable_fallback": 0}

    def place(self, ort: Any, device: Device) -> dict[str, Any]:
        # ONNX Runtime without CUDA has no memory on a GPU but the plugin's.
        known = inspect.signature(ort.OrtValue.ortvalue_from_shape_and_type).parameters
        if "memory_info" not in known:
            old = f"ONNX Runtime {ort.__version__} gives no arrays in the memory of a plugin"
            raise MissingPackageError(self._sentence(device, f"{old}; run `pip install -U onnxruntime`"))
        memory = self._gpu(ort, device).memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        if memory is None:  # ONNX Runtime would silently use the CPU's memory
            raise self.not_started(ort, device)
        return {"memory_info": memory}

    def _gpu(self, ort: Any, device: Device) -> Any:
        """The GPU of that number among those that the plugin has found."""
        gpus = [found for found in ort.get_ep_devices() if found.ep_name == self.name]
        if device.index >= len(gpus):
            raise self.not_started(ort, device)
        return gpus[device.index]

    def fault(self, ort: Any) -> str | None:
        if problem := self._register(ort):
            return problem
        if not any(found.ep_name == self.name for found in ort.get_ep_devices()):
            return _fault_of_driver(ort) or (
                "NVIDIA's plugin finds no RTX GPU (Ampere or newer); give another device"
            )
        return None

    def refuse_missing(self, ort: Any, device: Device) -> None:
        if problem := self._register(ort):
            raise MissingPackageError(self._sentence(device, problem))

    def _register(self, ort: Any) -> str | None:
        """Registers NVIDIA's plugin with ONNX Runtime; why it cannot be, or None."""
        if not hasattr(ort, "register_execution_provider_library"):
            return f"ONNX Runtime {ort.__version__} takes no plugins; run `pip install -U onnxruntime`"
        try:
            plugin = import_module(self.package)
        except ImportError:
            return (
                "NVIDIA's plugin for TensorRT-RTX is not installed; run `pip install "
                f"{self.package.replace('_', '-')}`"
            )
        if fault := _fault_of_driver(ort):
            return fault
        try:
            ort.register_execution_provider_library(self.name, plugin.get_library_path())
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if "already registered" in str(error).lower():
                return None
            reason = first_line(error).rpartition("with error: ")[2]
            return f"{reason:.200}; {self.install(reason)}"
        return None


PROVIDERS: dict[Kind, Provider] = {
    "cuda": CudaProvider(),
    "ort-tensorrt": TensorRtProvider(),
    "ort-tensorrt-rtx": TensorRtRtxProvider(),
}


def profile_shapes(spec: Spec, *, prefix: str) -> dict[str, str]:
    """The least, usual and most shapes of every graph input, in the providers' own words.

    One row to `MOST_ROWS`, one token to a whole segment; kernels are tuned for one row and a whole segment.
    """
    segment = spec.rule.segment
    sizes = {"min": (1, 1), "opt": (1, segment), "max": (MOST_ROWS, segment)}
    return {
        f"{prefix}_profile_{which}_shapes": ",".join(
            f"{fact.name}:"
            + "x".join(map(str, fact.sizes(batch=batch, tokens=tokens, rows=max(1, batch * tokens))))
            for fact in spec.inputs
        )
        for which, (batch, tokens) in sizes.items()
    }


def both_installed() -> bool:
    """Whether `onnxruntime` and `onnxruntime-gpu` are installed: they overwrite each other's files."""
    ort = importlib.util.find_spec("onnxruntime")
    if ort is None or ort.origin is None:
        return False
    # What pip writes next to a package. `importlib.metadata` would read all packages' own, for 20 ms.
    records = Path(ort.origin).parents[1].glob("onnxruntime*.dist-info")
    return {"onnxruntime", "onnxruntime_gpu"} <= {record.name.partition("-")[0] for record in records}


def fault_of_both() -> str | None:
    """What is wrong if both packages of ONNX Runtime are installed, and how to fix it; None otherwise."""
    if not both_installed():
        return None
    return (
        "onnxruntime and onnxruntime-gpu are both installed, and each overwrites files of the other; run "
        f"{INSTALL_GPU}"
    )


def _not_in_package(ort: Any, words: str) -> str:
    if fault := fault_of_both():
        return fault
    if driver := ask_driver().fault:  # who has no GPU should read that before downloading the package
        return f"{driver}; {INSTALL_DRIVER}, and then run {INSTALL_GPU}"
    return f"the installed onnxruntime {ort.__version__} is built without {words}; run {INSTALL_GPU}"


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
