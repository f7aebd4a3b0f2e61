"""A CUDA stream of a session's own, through NVIDIA's driver: copies, waits and captured steps.

ONNX Runtime computes on it, so inputs, kernels and outputs of a step follow each other without a wait, and
are captured together as one CUDA graph.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.sessions.ort_gpu.driver import LIBRARY

# The driver's numbers.
NON_BLOCKING = 1  # a stream that does not wait for CUDA's default stream
PORTABLE = 1  # pinned memory of all contexts
RELAXED = 2  # a capture during which any thread may allocate and free memory


class Stream:
    """A stream on one GPU, in the context that ONNX Runtime uses too. Raises OSError without a driver.

    It is never destroyed, because ONNX Runtime may use it until the end of its own session.
    """

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        device = ctypes.c_int()
        self._do("cuInit", 0)
        self._do("cuDeviceGet", ctypes.byref(device), index)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self._do("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    @property
    def address(self) -> int:
        """What ONNX Runtime's option `user_compute_stream` names."""
        return self._stream.value or 0

    def pinned(self, num_bytes: int) -> np.ndarray:
        """Host memory uint8 [num_bytes] that copies read and write without a wait."""
        self.enter()
        pointer = ctypes.c_void_p()
        self._do("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes), PORTABLE)
        assert pointer.value is not None
        block = (ctypes.c_uint8 * num_bytes).from_address(pointer.value)
        weakref.finalize(block, self._cuda.cuMemFreeHost, pointer).atexit = False
        return np.frombuffer(block, np.uint8)

    def upload(self, target: int, source: np.ndarray) -> None:
        """Enqueues a copy to an address on the GPU. Only pinned memory is copied while Python continues."""
        size = ctypes.c_size_t(source.nbytes)
        self._do("cuMemcpyHtoDAsync_v2", ctypes.c_void_p(target), _address(source), size, self._stream)

    def download(self, target: np.ndarray, source: int) -> None:
        """Enqueues a copy from an address on the GPU. Only pinned memory is copied while Python continues."""
        size = ctypes.c_size_t(target.nbytes)
        self._do("cuMemcpyDtoHAsync_v2", _address(target), ctypes.c_void_p(source), size, self._stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueues a copy from one address on the GPU to another."""
        size = ctypes.c_size_t(num_bytes)
        self._do("cuMemcpyDtoDAsync_v2", ctypes.c_void_p(target), ctypes.c_void_p(source), size, self._stream)

    def clear(self, target: int, num_bytes: int) -> None:
        """Enqueues the zeros of some bytes on the GPU."""
        self._do("cuMemsetD8Async", ctypes.c_void_p(target), 0, ctypes.c_size_t(num_bytes), self._stream)

    def synchronize(self) -> None:
        """Waits until everything that was enqueued is done."""
        self._do("cuStreamSynchronize", self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A function that enqueues, as one CUDA graph, what `enqueue` does; nothing of it runs yet."""
        graph = ctypes.c_void_p()
        self._do("cuStreamBeginCapture_v2", self._stream, RELAXED)
        try:
            enqueue()
        finally:
            code = self._cuda.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        self._refuse("cuStreamEndCapture", code)
        executable = ctypes.c_void_p()
        self._do("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self._do("cuGraphDestroy", graph)

        def launch() -> None:
            self._do("cuGraphLaunch", executable, self._stream)

        weakref.finalize(launch, self._cuda.cuGraphExecDestroy, executable).atexit = False
        return launch

    def enter(self) -> None:
        """Makes the GPU's context the current one of this thread."""
        self._do("cuCtxSetCurrent", self._context)

    def _do(self, name: str, *arguments: Any) -> None:
        self._refuse(name, getattr(self._cuda, name)(*arguments))

    def _refuse(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            words = (text.value or b"unknown").decode("utf-8", "replace")
            raise StreamError(
                f"the NVIDIA driver reports an error in {name} ({code}: {words}); open the artefact again, "
                "or give --device cpu."
            )


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
