"""A launch over tensors of this process: they are copied to the emulator, and what the kernel writes back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from tests.ptx.driver import execute
from tests.ptx.machine import GlobalMemory, KernelError
from tests.ptx.program import parse
from xl_export.tensorrt.kernels.compile import Kernel


def execute_over(
    kernel: Kernel,
    grid: tuple[int, int, int],
    addresses: Mapping[str, int],
    sizes: Mapping[str, int],
    numbers: Sequence[int],
    *,
    written: Collection[str],
    undefined: Collection[str],
    room: Callable[[int], int] | None = None,
) -> None:
    """Executes a launch over tensors by name, whose sizes are in bytes and exact.

    numbers: the arguments behind the addresses. written: the tensors that the kernel writes. undefined: those
    whose content before the launch must not be read. room: how many bytes there are from an address on; every
    tensor must have its size there.
    """
    for name, size in sizes.items():
        if room and size > room(addresses[name]):
            raise KernelError(f"{name} has {size} bytes and room for {room(addresses[name])}")
    parts = {name: range(addresses[name], addresses[name] + size) for name, size in sizes.items()}
    _refuse_overlaps(parts, written)
    memory = GlobalMemory()
    places = {}
    for name, size in sizes.items():
        places[name] = memory.allocate(size)
        if name not in undefined and size:
            memory.upload(places[name], _bytes(addresses[name], size))
    values = [*places.values(), *numbers]
    program = parse(kernel.ptx, kernel.name)
    execute(program, values, grid=grid, shared_bytes=kernel.shared_bytes, memory=memory)
    for name in written:
        if sizes[name]:
            _bytes(addresses[name], sizes[name])[:] = memory.download(places[name], sizes[name])


def _refuse_overlaps(parts: Mapping[str, range], written: Collection[str]) -> None:
    """Raises KernelError if bytes that a kernel writes belong to two tensors."""
    for name in written:
        for other, part in parts.items():
            if other != name and max(part.start, parts[name].start) < min(part.stop, parts[name].stop):
                raise KernelError(f"{name} overlaps {other}")


def _bytes(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
