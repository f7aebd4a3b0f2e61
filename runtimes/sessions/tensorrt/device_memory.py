"""What a session needs of the CUDA runtime: arrays on the device, pinned host arrays, a stream, captured graphs."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, MissingPackageError, StreamError
from runtimes.contract.engine import Gpu


class Cuda:
    """One GPU, the current one, and one stream of its own on it that everything here is queued on."""

    def __init__(self) -> None:
        try:
            self._cuda = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise MissingPackageError(
                "cuda-bindings is not installed and engines need it; run `pip install cuda-bindings`, "
                "of the major version of this machine's CUDA."
            ) from error
        problem, count = self._cuda.cudaGetDeviceCount()
        if problem != self._cuda.cudaError_t.cudaSuccess or not count:
            raise ArtefactError(
                f"no NVIDIA GPU can be used here ({problem.name}), and engines run on nothing else; install its driver, "
                "or run the artefact that the engine was built from, which needs none."
            )
        self.stream: int = int(
            self._ask(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))
        )
        weakref.finalize(self, self._cuda.cudaStreamDestroy, self.stream)

    @property
    def gpu(self) -> Gpu:
        properties = self._ask(self._cuda.cudaGetDeviceProperties(self._ask(self._cuda.cudaGetDevice())))
        name = properties.name.decode() if isinstance(properties.name, bytes) else properties.name
        return Gpu(name=name, compute_capability=f"{properties.major}.{properties.minor}")

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """An array on the device, its content undefined; raises StreamError where the GPU has no room for it."""
        num_bytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        problem, address = self._cuda.cudaMalloc(num_bytes)  # aligned to 256 bytes, as TensorRT wants
        if problem != self._cuda.cudaError_t.cudaSuccess:
            raise StreamError(
                f"the GPU has no room for {num_bytes / 2**20:,.0f} MiB more ({problem.name}); use a smaller batch."
            )
        return DeviceArray(self, int(address), shape, np.dtype(dtype))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> PinnedArray:
        """An array in page-locked host memory, its content undefined: copies from and to it need not wait."""
        num_bytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        address = int(self._ask(self._cuda.cudaMallocHost(num_bytes)))
        return PinnedArray(self, address, shape, np.dtype(dtype))

    def upload(self, target: DeviceArray, source: np.ndarray | PinnedArray) -> None:
        """Queues a copy to the device; a plain NumPy array must not change before `synchronize`."""
        address = source.address if isinstance(source, PinnedArray) else source.ctypes.data
        self._copy(
            target.address, address, target.num_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        )

    def download(self, target: np.ndarray | PinnedArray, source: DeviceArray) -> None:
        """Queues a copy from the device; `target` holds it after `synchronize`."""
        address = target.address if isinstance(target, PinnedArray) else target.ctypes.data
        self._copy(
            address, source.address, source.num_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        )

    def synchronize(self) -> None:
        """Returns when all that was queued is done; raises ArtefactError where something of it failed."""
        self._ask(self._cuda.cudaStreamSynchronize(self.stream))

    def capture(self, queue: Callable[[], None]) -> Graph:
        """What `queue` queues on the stream, as a graph that is launched as one: it is not run now.

        Relaxed, since Python may free an array of another stream meanwhile, which the other modes take for an error.
        """
        self._ask(
            self._cuda.cudaStreamBeginCapture(
                self.stream, self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
            )
        )
        try:
            queue()
        finally:
            ended = self._cuda.cudaStreamEndCapture(self.stream)
        graph = self._ask(ended)
        executable = self._ask(self._cuda.cudaGraphInstantiate(graph, 0))
        self._ask(self._cuda.cudaGraphDestroy(graph))
        return Graph(self, executable)

    def launch(self, graph: Graph) -> None:
        """Queues a captured graph."""
        self._ask(self._cuda.cudaGraphLaunch(graph.executable, self.stream))

    def release(self, kind: str, what: Any) -> None:
        """Gives back memory (`cudaFree`, `cudaFreeHost`) or a graph; nothing is left to do where that fails at exit."""
        getattr(self._cuda, kind)(what)

    def _copy(self, target: int, source: int, num_bytes: int, kind: Any) -> None:
        self._ask(self._cuda.cudaMemcpyAsync(target, source, num_bytes, kind, self.stream))

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        """The value of a CUDA call; raises ArtefactError where it failed."""
        problem, *values = answer
        if problem != self._cuda.cudaError_t.cudaSuccess:
            raise ArtefactError(
                f"the GPU reports {problem.name}; open the engine again, in a new process if that is not enough."
            )
        return values[0] if values else None


class DeviceArray:
    """An array on the device, freed with its last user. NumPy sees its content: `np.asarray` and `copy` download it."""

    def __init__(self, cuda: Cuda, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.cuda, self.address, self.shape, self.dtype = cuda, address, shape, dtype
        self.num_bytes = math.prod(shape) * dtype.itemsize
        weakref.finalize(self, cuda.release, "cudaFree", address)

    def copy(self) -> np.ndarray:
        """The content as a new array on the host."""
        host = np.empty(self.shape, self.dtype)
        self.cuda.download(host, self)
        self.cuda.synchronize()
        return host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = self.copy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled memory holds plain arrays
        return np.array, (self.copy(),)


class PinnedArray:
    """Page-locked host memory as a NumPy array, `host`, freed with this object."""

    def __init__(self, cuda: Cuda, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.address, num_bytes = address, math.prod(shape) * dtype.itemsize
        self.host = np.frombuffer((ctypes.c_byte * num_bytes).from_address(address), dtype).reshape(shape)
        weakref.finalize(self, cuda.release, "cudaFreeHost", address)


class Graph:
    """A captured CUDA graph, ready to be launched. It holds addresses: it is right as long as its buffers are."""

    def __init__(self, cuda: Cuda, executable: Any) -> None:
        self.executable = executable
        weakref.finalize(self, cuda.release, "cudaGraphExecDestroy", executable)
