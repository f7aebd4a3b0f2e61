"""The kernels as an engine launches them, without TensorRT: the PTX that a plan embeds goes through the CUDA
driver, and the answers are compared with the naive operator.

It needs the driver and `cuda-bindings`, and to compile also Triton. Most tests run it with a driver that
executes the PTX on the CPU; `pytest -m gpu` runs it on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, needs
from runtimes.contract.engine import Gpu
from xl_export.tensorrt.kernels.cases import Case
from xl_export.tensorrt.kernels.compile import (
    Kernel,
    Sizes,
    Tactic,
    Type,
    compile_kernel,
    constants,
    join_constants,
    parts,
    scratch_rows,
)
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.operator import Attributes

TOLERANCES = {"float16": 3e-3, "float32": 1e-5}  # of answers whose largest number is about 1
LAUNCHES = 10  # of a call in the CUDA graph that is timed


class Driver:
    """The CUDA driver with one GPU and its primary context. What is made within `freed` is freed at its end.

    Raises MissingPackageError without `cuda-bindings`, and ArtefactError without a GPU or its driver.
    """

    def __init__(self) -> None:
        with needs("tensorrt", "cuda"):
            self._cuda = import_module("cuda.bindings.driver")
        try:
            (problem,) = self._cuda.cuInit(0)
        except Exception as error:  # no driver was found; the error's class differs between versions
            raise ArtefactError(f"{_NO_GPU} (the driver is not installed).") from error
        if problem != self._cuda.CUresult.CUDA_SUCCESS:
            raise ArtefactError(f"{_NO_GPU} ({problem.name}).")
        self._device = self._ask("cuDeviceGet", 0)
        self._ask("cuCtxSetCurrent", self._ask("cuDevicePrimaryCtxRetain", self._device))
        self._stream = self._ask("cuStreamCreate", 0)
        self._addresses: list[Any] = []
        self._modules: list[Any] = []

    @property
    def gpu(self) -> Gpu:
        """The name and the compute capability of the GPU."""
        name = self._ask("cuDeviceGetName", 100, self._device).split(b"\0")[0].decode()
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{which}") for which in ("MAJOR", "MINOR"))
        return Gpu(name=name, compute_capability=f"{major}.{minor}")

    @property
    def cuda(self) -> str:
        """The newest CUDA version that the driver supports, such as 13.0; many drivers have the same one."""
        number = int(self._ask("cuDriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors the GPU has."""
        return self._attribute("MULTIPROCESSOR_COUNT")

    def load(self, kernel: Kernel) -> Any:
        """The function of a kernel, whose PTX the driver compiles now."""
        module = self._ask("cuModuleLoadData", kernel.ptx.encode() + b"\0")
        self._modules.append(module)
        return self._ask("cuModuleGetFunction", module, kernel.name.encode())

    def empty(self, num_bytes: int) -> int:
        """The address of new memory, all of whose bytes are 255: NaN, where floats are read."""
        address = self._ask("cuMemAlloc", max(1, num_bytes))
        self._addresses.append(address)
        self._ask("cuMemsetD8", address, 255, max(1, num_bytes))
        return int(address)

    def upload(self, array: np.ndarray) -> int:
        """The address of new memory with the content of the array."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        self._ask("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
        return address

    def download(self, target: np.ndarray, address: int) -> None:
        """Copies from an address into the array, when all launches are done."""
        self._ask("cuMemcpyDtoH", target.ctypes.data, address, target.nbytes)

    def launch(
        self, function: Any, grid: tuple[int, int, int], kernel: Kernel, arguments: Sequence[int]
    ) -> None:
        """Queues a kernel. arguments: addresses, integers and the bits of floats, as its parameters."""
        kinds = tuple(
            ctypes.c_void_p if kind == "u64" else ctypes.c_int32 for kind in parameter_kinds(kernel)
        )
        assert len(kinds) == len(arguments), (kernel.name, kinds, arguments)
        block = (kernel.threads, 1, 1)
        self._ask(
            "cuLaunchKernel",
            function,
            *grid,
            *block,
            kernel.shared_bytes,
            self._stream,
            (tuple(arguments), kinds),
            0,
        )

    def milliseconds(self, call: Callable[[], None], repeats: int) -> tuple[float, ...]:
        """How long the GPU works on what `call` queues, measured so often.

        A CUDA graph holds the launches of several calls, as an engine's does: Python queues kernels of
        microseconds more slowly than a GPU computes them.
        """
        modes = self._cuda.CUstreamCaptureMode
        self._ask("cuStreamBeginCapture", self._stream, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        for _ in range(LAUNCHES):
            call()
        graph = self._ask("cuStreamEndCapture", self._stream)
        launched = self._ask("cuGraphInstantiate", graph, 0)
        start, stop = (self._ask("cuEventCreate", 0) for _ in range(2))
        took = []
        for _ in range(repeats):
            self._ask("cuEventRecord", start, self._stream)
            self._ask("cuGraphLaunch", launched, self._stream)
            self._ask("cuEventRecord", stop, self._stream)
            self._ask("cuEventSynchronize", stop)
            took.append(float(self._ask("cuEventElapsedTime", start, stop)) / LAUNCHES)
        for event in (start, stop):
            self._ask("cuEventDestroy", event)
        self._ask("cuGraphExecDestroy", launched)
        self._ask("cuGraphDestroy", graph)
        return tuple(took)

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Frees at its end the memory and the modules that were made within the block."""
        try:
            yield
        finally:
            for address in self._addresses:
                self._ask("cuMemFree", address)
            for module in self._modules:
                self._ask("cuModuleUnload", module)
            self._addresses = []
            self._modules = []

    def _attribute(self, name: str) -> int:
        which = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._ask("cuDeviceGetAttribute", which, self._device))

    def _ask(self, function: str, *arguments: Any) -> Any:
        problem, *values = getattr(self._cuda, function)(*arguments)
        if problem != self._cuda.CUresult.CUDA_SUCCESS:
            raise ArtefactError(
                f"the GPU's driver reports {problem.name} for {function}; please report this."
            )
        return values[0] if values else None


_NO_GPU = "no NVIDIA GPU can be used here, and the kernels run on nothing else; install the GPU's driver"


def parameter_kinds(kernel: Kernel) -> list[str]:
    """The types of the kernel's parameters as its PTX declares them, such as u64 for an address."""
    declared = kernel.ptx.split(f".entry {kernel.name}(")[1].split(")")[0]
    return [line.split(".param .")[1].split()[0] for line in declared.splitlines() if ".param" in line]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The operator's answer [B, H, T, K] from a GPU, and the milliseconds that each repeat took."""

    answer: np.ndarray
    milliseconds: tuple[float, ...]


def run_embedded(
    driver: Driver,
    inputs: Mapping[str, np.ndarray],
    attributes: Attributes,
    *,
    mem_len: int | None = None,
    tactic: Tactic,
    join: Tactic,
    repeats: int = 0,
) -> Answer:
    """What the two kernels of an engine for this GPU answer to the operator's inputs.

    inputs: by name, in the operator's order. mem_len: of the operator over a ring, or None. repeats: how
    often it is timed. Raises ArtefactError if the driver refuses a kernel.
    """
    kernels = compile_pair(
        [array.shape for array in inputs.values()],
        attributes,
        mem_len,
        tactic=tactic,
        join=join,
        compute_capability=driver.gpu.capability,
        dtype=str(inputs["query"].dtype),  # type: ignore[arg-type]
    )
    return run_kernels(driver, inputs, *kernels, repeats=repeats)


def compile_pair(
    shapes: Sequence[Sequence[int]],
    attributes: Attributes,
    mem_len: int | None,
    *,
    tactic: Tactic,
    join: Tactic,
    compute_capability: int,
    dtype: Type,
) -> tuple[Kernel, Kernel]:
    """The two kernels of an attention whose inputs have these shapes."""
    sizes = Sizes.of(shapes)
    first = constants(tactic, sizes, attributes, mem_len)
    second = join_constants(join, sizes.head_dim)
    return (
        compile_kernel(tactic, first, compute_capability=compute_capability, dtype=dtype),
        compile_kernel(join, second, compute_capability=compute_capability, dtype=dtype),
    )


def run_kernels(
    driver: Driver, inputs: Mapping[str, np.ndarray], first: Kernel, second: Kernel, *, repeats: int = 0
) -> Answer:
    """What two kernels answer to the operator's inputs, with an engine's grids and arguments."""
    query = inputs["query"]
    B, H, T, K = query.shape
    J = inputs["key"].shape[2]
    multiprocessors = driver.multiprocessors
    number = parts(B, H, T, J, multiprocessors=multiprocessors)
    rows = scratch_rows(B, H, T, multiprocessors=multiprocessors)
    with driver.freed():
        addresses = [driver.upload(array) for array in inputs.values()]
        mixed, level, out = (driver.empty(size) for size in (rows * K * 4, rows * 4, query.nbytes))
        attention = driver.load(first)
        joining = driver.load(second)

        def call() -> None:
            grid = (B * H, -(-T // first.block_t), number)
            driver.launch(attention, grid, first, [*addresses, T, J, mixed, level])
            grid = (-(-(B * H * T) // second.block_t), 1, 1)
            driver.launch(joining, grid, second, [*addresses[:2], mixed, level, B * H * T, number, out])

        call()
        answer = np.empty_like(query)
        driver.download(answer, out)
        took = driver.milliseconds(call, repeats) if repeats else ()
    return Answer(answer=answer, milliseconds=took)


def naive_answer(case: Case) -> np.ndarray:
    """What the naive operator answers to a case, computed in float64; [B, H, T, K]."""
    arrays = case.inputs().values()
    return naive_relative_attention(*arrays, attributes=case.attributes, mem_len=case.mem_len)
