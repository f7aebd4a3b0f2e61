"""A stand-in for `cuda.bindings.runtime` and `tensorrt` on a machine without a GPU: for the logic of
sessions, not its numbers.

Device memory is host memory that starts as NaN. Whatever is queued runs only when the stream is synchronized,
so a missing synchronization shows. A captured graph keeps its addresses. A "plan" names an artefact, which
ONNX Runtime runs; the context refuses what TensorRT refuses: shapes outside the profile, unaligned or shared
buffers, capturing before a plain step. Rings are written in place, as TensorRT writes them.
`tests/xl_export/tensorrt/test_bindings.py` shows that every name here exists in the real packages.
"""

# ruff: noqa: N802, N815 (the names are those of CUDA)

from __future__ import annotations

import ctypes
import enum
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes.base.sealed import file_facts
from runtimes.contract.engine import PLAN, EngineFacts, Gpu, Profile, save_engine, side_files
from runtimes.contract.spec import GRAPH, load_spec

GPU = Gpu(name="Fake RTX", compute_capability="8.9")
PROFILES = (
    Profile(name="segment", batch=(1, 1, 16), tokens=(1, 8, 8)),
    Profile(name="token", batch=(1, 1, 2), tokens=(1, 1, 1)),
)
DataType = enum.Enum("DataType", ["FLOAT", "HALF", "BF16", "INT64"])
TYPES = {"int64": "INT64", "float32": "FLOAT", "float16": "HALF"}
KINDS = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


class FakeCuda:
    """The functions of `cuda.bindings.runtime` that are in use. `calls` counts them; `full`: no memory is
    left.
    """

    cudaError_t = enum.Enum("cudaError_t", ["cudaSuccess", "cudaErrorMemoryAllocation", "cudaErrorNoDevice"])
    cudaMemcpyKind = enum.Enum(
        "cudaMemcpyKind", ["cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"]
    )
    cudaStreamNonBlocking = 1
    cudaStreamCaptureMode = enum.Enum("cudaStreamCaptureMode", ["cudaStreamCaptureModeRelaxed"])

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None
        self.calls: dict[str, int] = {}
        self.full, self.count = False, 1
        self.contexts: list[Any] = []  # the configuration, or the strategy, of each execution context

    def _ok(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls[name] = self.calls.get(name, 0) + 1
        return (self.cudaError_t.cudaSuccess, *values)

    def enqueue(self, work: Callable[[], None]) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return self._ok("count", self.count) if self.count else (self.cudaError_t.cudaErrorNoDevice, 0)

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return self._ok("driver", 13010)

    def cudaGetDevice(self) -> tuple[Any, ...]:
        return self._ok("device", 0)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        major, minor = map(int, GPU.compute_capability.split("."))
        known = {"name": GPU.name.encode(), "major": major, "minor": minor, "multiProcessorCount": 16}
        return self._ok("properties", SimpleNamespace(**known))

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        return self._ok("stream", 7)

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        assert stream == 7
        return self._ok("stream destroyed")

    def cudaMalloc(self, num_bytes: int) -> tuple[Any, ...]:
        if self.full:
            return (self.cudaError_t.cudaErrorMemoryAllocation, 0)
        block = ctypes.create_string_buffer(b"\xff" * (num_bytes + 256), num_bytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return self._ok("malloc", address)

    cudaMallocHost = cudaMalloc

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.memory[address]
        return self._ok("free")

    cudaFreeHost = cudaFree

    def cudaMemcpyAsync(
        self, target: int, source: int, num_bytes: int, kind: Any, stream: int
    ) -> tuple[Any, ...]:
        self.enqueue(lambda: ctypes.memmove(target, source, num_bytes) and None)
        return self._ok("copy")

    def cudaMemsetAsync(self, address: int, value: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        self.enqueue(lambda: ctypes.memset(address, value, num_bytes) and None)
        return self._ok("set")

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert self.captured is None, "a stream that is being captured cannot be waited for"
        while self.queue:
            self.queue.pop(0)()
        return self._ok("synchronize")

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        self.captured = []
        return self._ok("begin")

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        graph, self.captured = self.captured, None
        return self._ok("end", graph)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        return self._ok("instantiate", list(graph))

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        self.queue.extend(graph)
        return self._ok("launch")

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return self._ok("destroy")

    cudaGraphExecDestroy = cudaGraphDestroy


class FakeTensorRT:
    """The names of `tensorrt` that sessions use."""

    __version__ = "11.4.0.106"
    TensorIOMode = enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"])
    CudaGraphStrategy = enum.Enum("CudaGraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"])
    DynamicShapesKernelSpecializationStrategy = enum.Enum("Specialisation", ["LAZY", "EAGER", "NONE"])
    ExecutionContextAllocationStrategy = enum.Enum("Allocation", ["STATIC", "ON_PROFILE_CHANGE"])

    class ILogger:
        Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self, cuda: FakeCuda) -> None:
        self.Runtime = lambda log: SimpleNamespace(
            deserialize_cuda_engine=lambda plan: _Engine(cuda, self, log, plan),
            engine_host_code_allowed=False,
        )


class _Engine:
    def __init__(self, cuda: FakeCuda, trt: FakeTensorRT, log: Any, plan: bytes) -> None:
        import onnxruntime

        document = json.loads(plan)
        self.cuda, self.log, self.profiles = cuda, log, document["profiles"]
        nodes = onnx.load(document["graph"], load_external_data=False).graph.node
        self.aliases = {node.output[0]: node.input[0] for node in nodes if node.op_type == "TensorScatter"}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # it warns where a ring is not in place
        self.ort = onnxruntime.InferenceSession(document["graph"], options)
        nodes = [
            (node, mode)
            for mode in ("INPUT", "OUTPUT")
            for node in getattr(self.ort, f"get_{mode.lower()}s")()
        ]
        self.tensors = {node.name: (node, trt.TensorIOMode[mode]) for node, mode in nodes}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[TYPES[KINDS[self.tensors[name][0].type].__name__]]

    def get_tensor_mode(self, name: str) -> Any:
        return self.tensors[name][1]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.tensors[name][0].shape)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_runtime_config(self) -> _RuntimeConfig:
        return _RuntimeConfig()

    def create_execution_context(self, config: Any) -> _Context:
        self.cuda.contexts.append(config)
        return _Context(self)


class _RuntimeConfig:
    """That of TensorRT-RTX; its runtime cache is a text."""

    def __init__(self) -> None:
        self.allocation = self.cache = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> SimpleNamespace:
        cache = SimpleNamespace(read=b"", serialize=lambda: cache.read + b" and more")
        cache.deserialize = lambda content: setattr(cache, "read", bytes(content))
        return cache

    def set_runtime_cache(self, cache: Any) -> None:
        self.cache = cache


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine, self.fresh, self.changes = engine, False, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream, "TensorRT wants a stream of the session's own"
        self.profile = self.engine.profiles[index]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        node = self.engine.tensors[name][0]
        most = {"batch": self.profile["batch"][2], "tokens": self.profile["tokens"][2]}
        most["rows"] = most["batch"] * most["tokens"]
        fits = len(shape) == len(node.shape) and all(
            1 <= size <= most[axis] if isinstance(axis, str) else size == axis
            for size, axis in zip(shape, node.shape, strict=True)
        )
        if fits:
            self.shapes[name], self.fresh = tuple(shape), False
            self.changes += 1
        else:
            self.engine.log.log(FakeTensorRT.ILogger.Severity.ERROR, f"{name} {shape} is outside the profile")
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0, f"{name} is not aligned"
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        cuda, addresses, shapes = self.engine.cuda, dict(self.addresses), dict(self.shapes)
        assert addresses.keys() == self.engine.tensors.keys(), "a tensor has no address"
        apart = {name: address for name, address in addresses.items() if name not in self.engine.aliases}
        assert len(set(apart.values())) == len(apart), "two tensors share a buffer (NVIDIA/TensorRT#4681)"
        for present, past in self.engine.aliases.items():
            assert addresses[present] == addresses[past], f"{present} is not written in place"
        if cuda.captured is not None and not self.fresh:
            self.engine.log.log(FakeTensorRT.ILogger.Severity.ERROR, "a step must run before one is captured")
            return False
        self.fresh, changes = True, self.changes
        cuda.enqueue(lambda: self._compute(addresses, shapes, changes))
        return True

    def _compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]], changes: int) -> None:
        assert changes == self.changes, "a graph is launched that was captured under other shapes"
        feed = {
            name: _view(addresses[name], shape, KINDS[self.engine.tensors[name][0].type])
            for name, shape in shapes.items()
        }
        names = [node.name for node in self.engine.ort.get_outputs()]
        for name, array in zip(names, self.engine.ort.run(names, feed), strict=True):
            _view(addresses[name], array.shape, array.dtype)[...] = array


def _view(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * num_bytes).from_address(address), dtype).reshape(shape)


def install(patch: pytest.MonkeyPatch, *, package: str = "tensorrt", **changes: Any) -> FakeCuda:
    """Puts the stand-ins in the place of the packages for one test."""
    cuda = FakeCuda()
    trt = FakeTensorRT(cuda)
    vars(trt).update(changes, __spec__=ModuleSpec(package, None))  # PyTorch's compiler looks for it
    patch.setitem(sys.modules, "cuda.bindings.runtime", cuda)  # type: ignore[arg-type]
    patch.setitem(sys.modules, package, trt)  # type: ignore[arg-type]
    return cuda


def make_engine(artefact: Path, out: Path, **changes: Any) -> Path:
    """An engine folder with a plan that the stand-in understands."""
    out.mkdir()
    profiles = changes.get("profiles", PROFILES)
    plan = {
        "graph": str(artefact / GRAPH),
        "profiles": [{"batch": p.batch, "tokens": p.tokens} for p in profiles],
    }
    (out / PLAN).write_text(json.dumps(plan))
    for name in side_files(load_spec(artefact)):
        (out / name).write_bytes((artefact / name).read_bytes())
    facts: dict[str, Any] = {
        "artefact": load_spec(artefact).identity,
        "flavour": "tensorrt",
        "version": FakeTensorRT.__version__,
        "attention": "native",
        "compute_capabilities": (GPU.compute_capability,),
        "gpu": GPU,
        "hardware": "same-gpu",
        "version_compatible": False,
        "refit": False,
        "profiles": profiles,
        "layers": {"MATRIX_MULTIPLY": 3},
        "types": {"FLOAT": 3},
        "plugin_layers": 0,
        "seconds": 1.0,
        "producer": {},
        "files": {path.name: file_facts(path) for path in sorted(out.iterdir())},
    }
    save_engine(out, EngineFacts(**{**facts, **changes}))
    return out
