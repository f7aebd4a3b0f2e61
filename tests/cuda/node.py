"""The nodes for `cuda` without a GPU: their library launches kernels through the stub driver, and `tests/ptx`
executes them. The provider is CUDA's where it is installed (`make test-cuda`), and else the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from runtimes.sessions.fused_cpu import build
from runtimes.sessions.ort_gpu.session import ON_OUR_STREAM
from runtimes.sessions.ort_gpu.stream import Stream
from tests.cuda.stubs import STUB_DRIVER, Stubs
from tests.ptx import product
from tests.ptx.ring import execute_at, shipped_as

PROVIDER = "CUDAExecutionProvider"
ON_CUDA = PROVIDER in ort.get_available_providers()
DEVICE = "cuda" if ON_CUDA else "cpu"
Sizes = tuple[int, ...]  # of a launch: its grid, threads of a block, bytes of shared memory


def library_for_cpu(folder: Path) -> Path:
    """The library, with the nodes of the CUDA provider in the CPU provider, and over the stub driver."""
    library = folder / "node.so"
    with pytest.MonkeyPatch.context() as patch:  # no other test finds what is built here
        patch.setenv("XDG_CACHE_HOME", str(folder))
        code = build().read_bytes()
    stub = STUB_DRIVER.encode()
    for name, other in (
        (b"CUDAExecutionProvider", b"CPUExecutionProvider"),
        (b"libcuda.so.1", stub),
        (b"libcublas.so.13", stub),
    ):
        assert code.count(name + b"\0") == 1
        code = code.replace(name + b"\0", other.ljust(len(name) + 1, b"\0"))
    library.write_bytes(code)
    return library


@contextmanager
def emulated(stubs: Stubs, room: Callable[[int], int] | None = None) -> Iterator[list[Sizes]]:
    """The sizes of each launch; all are executed. room: see `execute_at`."""
    launches: list[Sizes] = []

    def execute(name: str, ptx: str, sizes: Sizes, arguments: list[int]) -> None:
        launches.append(sizes)
        *grid, threads, shared_bytes = sizes
        x, y, z = grid
        if name == "cublasGemmEx":
            return product.multiply_at((x, y, z), arguments, room=room)
        ours = name.startswith("product")
        types, kernel = product.shipped_as(ptx) if ours else shipped_as(ptx)
        assert (name, threads, shared_bytes) == (kernel.name, kernel.threads, kernel.shared_bytes)
        run = product.execute_at if ours else execute_at
        run(kernel, (x, y, z), arguments, types=types, room=room)

    stubs.execute_with(execute)
    yield launches
    stubs.execute_nothing()
    stubs.raise_errors()


class OneNode:
    """A session over a graph of one node, on the stream that its steps are captured from."""

    def __init__(self, graph: bytes, library: Path, *, tf32: bool = False) -> None:
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        providers: list[Any] = ["CPUExecutionProvider"]
        self.options = ort.RunOptions()
        if ON_CUDA:
            self.stream = Stream(0)
            chosen = {"user_compute_stream": str(self.stream.address), "enable_cuda_graph": "1"}
            chosen["use_tf32"] = str(int(tf32))
            providers = [(PROVIDER, chosen)]
            for name, value in ON_OUR_STREAM.items():
                self.options.add_run_config_entry(name, value)
        self.session = ort.InferenceSession(graph, options, providers=providers)

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Any:
        """The binding of a step to arrays on the device."""
        io = self.session.io_binding()
        for bind, tensors in ((io.bind_input, inputs), (io.bind_output, outputs)):
            for name, array in tensors.items():
                bind(name, DEVICE, 0, array.dtype, array.shape, array.ctypes.data)
        return io

    def run(self, io: Any) -> None:
        self.session.run_with_iobinding(io, self.options)
