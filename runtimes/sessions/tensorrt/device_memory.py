"""The parts of the CUDA runtime that a session uses: arrays on the device, pinned host arrays, a stream,
captured graphs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, MissingPackageError, StreamError
from runtimes.contract.engine import Gpu
from runtimes.contract.memory import DeviceTensor


class Cuda:
    """The current GPU with one stream, on which everything here is queued."""

    def __init__(self) -> None:
        try:
            self._cuda = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise MissingPackageError(
                "cuda-bindings is not installed and engines need it; run `pip install cuda-bindings`, in "
                "the major version of this machine's CUDA."
            ) from error
        problem, count = self._cuda.cudaGetDeviceCount()
        if problem != self._cuda.cudaError_t.cudaSuccess or not count:
            raise ArtefactError(
                f"no NVIDIA GPU can be used here ({problem.name}), and engines run on nothing else; install "
                "the GPU's driver, or run the artefact that the engine was built from, which needs no GPU."
            )
        # The default stream would wait for work of other libraries in the process.
        self.stream: int = int(
            self._ask(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))
        )
        weakref.finalize(self, self._cuda.cudaStreamDestroy, self.stream)

    @property
    def gpu(self) -> Gpu:
        """The name and the compute capability of this GPU."""
        properties = self._properties()
        name = properties.name.decode() if isinstance(properties.name, bytes) else properties.name
        return Gpu(name=name, compute_capability=f"{properties.major}.{properties.minor}")

    @property
    def driver_cuda(self) -> str:
        """The newest CUDA version that the driver supports, such as 13.0; many drivers have the same one."""
        number = self._ask(self._cuda.cudaDriverGetVersion())
        return f"{number // 1000}.{number % 1000 // 10}"

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors this GPU has."""
        return int(self._properties().multiProcessorCount)

    def _properties(self) -> Any:
        return self._ask(self._cuda.cudaGetDeviceProperties(self._ask(self._cuda.cudaGetDevice())))

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """A new array on the device, with undefined content; raises StreamError if the GPU has no room."""
        num_bytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        problem, address = self._cuda.cudaMalloc(num_bytes)  # aligned to 256 bytes, as TensorRT demands
        if problem != self._cuda.cudaError_t.cudaSuccess:
            raise StreamError(
                f"the GPU has no room for {num_bytes / 2**20:,.0f} MiB more ({problem.name}); use a smaller "
                "batch."
            )
        return DeviceArray(self, int(address), shape, np.dtype(dtype))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> PinnedArray:
        """A new array in page-locked host memory with undefined content: copies from it and to it run while
        Python continues.
        """
        num_bytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        address = int(self._ask(self._cuda.cudaMallocHost(num_bytes)))
        return PinnedArray(self, address, shape, np.dtype(dtype))

    def upload(self, target: DeviceArray, source: np.ndarray | PinnedArray) -> None:
        """Queues a copy to the device; the source must not change before `synchronize`."""
        self.upload_to(target.address, source.host if isinstance(source, PinnedArray) else source)

    def download(self, target: np.ndarray | PinnedArray, source: DeviceArray) -> None:
        """Queues a copy from the device; `target` holds it after `synchronize`."""
        self.download_from(target.host if isinstance(target, PinnedArray) else target, source.address)

    def upload_to(self, target: int, source: np.ndarray) -> None:
        """Queues a copy to an address on the device; the source must not change before `synchronize`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(target, source.ctypes.data, source.nbytes, kind)

    def download_from(self, target: np.ndarray, source: int) -> None:
        """Queues a copy from an address on the device; `target` holds it after `synchronize`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(target.ctypes.data, source, target.nbytes, kind)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queues a copy from one address on the device to another."""
        self._copy(target, source, num_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice)

    def clear(self, address: int, num_bytes: int) -> None:
        """Queues the zeros of some bytes on the device."""
        self._ask(self._cuda.cudaMemsetAsync(address, 0, num_bytes, self.stream))

    def synchronize(self) -> None:
        """Returns when all queued work is done; raises ArtefactError if a part of it failed."""
        self._ask(self._cuda.cudaStreamSynchronize(self.stream))

    def capture(self, queue: Callable[[], None]) -> Graph:
        """A graph of the work that `queue` queues on the stream; the work does not run now, but with each
        `launch`.

        The mode is relaxed, because Python may free an array during the capture, which the other modes call
        an error.
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

    def release(self, function: str, resource: Any) -> None:
        """Frees memory or a graph with a function of CUDA; errors are ignored, since they come when the
        process ends.
        """
        getattr(self._cuda, function)(resource)

    def _copy(self, target: int, source: int, num_bytes: int, kind: Any) -> None:
        self._ask(self._cuda.cudaMemcpyAsync(target, source, num_bytes, kind, self.stream))

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        """The value that a CUDA call returned; raises ArtefactError if the call failed."""
        problem, *values = answer
        if problem != self._cuda.cudaError_t.cudaSuccess:
            raise ArtefactError(
                f"the GPU reports {problem.name}; open the engine again, and start a new process if that "
                "does not help."
            )
        return values[0] if values else None


class DeviceArray(DeviceTensor):
    """An array on the device, freed when nothing refers to it."""

    def __init__(self, cuda: Cuda, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.cuda = cuda
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.num_bytes = math.prod(shape) * dtype.itemsize
        weakref.finalize(self, cuda.release, "cudaFree", address)

    def copy(self) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        self.cuda.download(host, self)
        self.cuda.synchronize()
        return host

    def clear(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.cuda.clear(self.address + row * self._row_bytes, self._row_bytes)

    def rows(self, chosen: Sequence[int]) -> np.ndarray:
        found = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        for place, row in enumerate(chosen):
            self.cuda.download_from(found[place, None], self.address + row * self._row_bytes)
        self.cuda.synchronize()
        return found

    def write_rows(self, rows: Sequence[int], sources: Sequence[tuple[Any, int]]) -> None:
        kept = []  # until they were read
        for row, (source, place) in zip(rows, sources, strict=True):
            target = self.address + row * self._row_bytes
            if isinstance(source, DeviceArray):
                self.cuda.copy(target, source.address + place * self._row_bytes, self._row_bytes)
            else:
                kept.append(np.ascontiguousarray(source[place, None]))
                self.cuda.upload_to(target, kept[-1])
        if kept:
            self.cuda.synchronize()

    @property
    def _row_bytes(self) -> int:
        return int(self.num_bytes // self.shape[0])


class PinnedArray:
    """Page-locked host memory as a NumPy array, `host`, freed with this object."""

    def __init__(self, cuda: Cuda, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.address = address
        num_bytes = math.prod(shape) * dtype.itemsize
        self.host = np.frombuffer((ctypes.c_byte * num_bytes).from_address(address), dtype).reshape(shape)
        weakref.finalize(self, cuda.release, "cudaFreeHost", address)


class Graph:
    """A captured CUDA graph, ready to be launched. It holds addresses, so it is valid as long as its buffers
    exist.
    """

    def __init__(self, cuda: Cuda, executable: Any) -> None:
        self.executable = executable
        weakref.finalize(self, cuda.release, "cudaGraphExecDestroy", executable)
