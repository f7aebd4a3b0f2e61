"""The CUDA driver's part in a launch, on the CPU: kernels' PTX is executed by `machine.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from runtimes.contract.engine import Gpu
from tests.ptx.instructions import TABLE
from tests.ptx.machine import GlobalMemory, Machine
from tests.ptx.program import Program, parse
from xl_export.tensorrt.kernels.compile import Kernel

TOGETHER = 16384  # threads that advance together, in whole blocks
ORDER = 1  # in which blocks run; -1 is the last one first


def execute(
    program: Program,
    arguments: Sequence[int],
    *,
    grid: tuple[int, int, int],
    shared_bytes: int,
    memory: GlobalMemory,
) -> None:
    """Executes every block of a grid. arguments: addresses and integers in the order of the parameters."""
    blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    blocks = blocks[::ORDER]
    each = max(1, TOGETHER // program.threads)
    for start in range(0, len(blocks), each):
        machine = Machine(
            program,
            arguments,
            blocks=blocks[start : start + each],
            grid=grid,
            shared_bytes=shared_bytes,
            memory=memory,
        )
        with np.errstate(all="ignore"):
            machine.run(TABLE)


class EmulatedDriver:
    """What `run_embedded` needs of `Driver`, for a GPU of this compute capability (86 for 8.6)."""

    def __init__(self, capability: int, *, multiprocessors: int) -> None:
        major, minor = divmod(capability, 10)
        self.gpu = Gpu(name="the emulator", compute_capability=f"{major}.{minor}")
        self.multiprocessors = multiprocessors
        self.memory = GlobalMemory()

    def load(self, kernel: Kernel) -> Program:
        return parse(kernel.ptx, kernel.name)

    def empty(self, num_bytes: int) -> int:
        return self.memory.allocate(num_bytes)

    def upload(self, array: np.ndarray) -> int:
        address = self.empty(array.nbytes)
        self.memory.upload(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return address

    def download(self, target: np.ndarray, address: int) -> None:
        target.reshape(-1).view(np.uint8)[:] = self.memory.download(address, target.nbytes)

    def launch(
        self, program: Program, grid: tuple[int, int, int], kernel: Kernel, arguments: Sequence[int]
    ) -> None:
        assert program.threads == kernel.threads
        execute(program, arguments, grid=grid, shared_bytes=kernel.shared_bytes, memory=self.memory)

    @contextmanager
    def freed(self) -> Iterator[None]:
        yield
        self.memory = GlobalMemory()
