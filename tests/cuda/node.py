"""The node for `cuda` without a GPU: its library launches the kernel through the stub driver, and `tests/ptx`
executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu import build
from tests.cuda.stubs import STUB_DRIVER, Stubs
from tests.ptx.ring import execute_at, shipped_as

Sizes = tuple[int, ...]  # of a launch: its grid, threads of a block, bytes of shared memory


def library_for_cpu(folder: Path) -> Path:
    """The library, with the nodes of the CUDA provider in the CPU provider, and over the stub driver."""
    library = folder / "node.so"
    with pytest.MonkeyPatch.context() as patch:  # no other test finds what is built here
        patch.setenv("XDG_CACHE_HOME", str(folder))
        code = build().read_bytes()
    provider, driver = b"CPUExecutionProvider\0\0", f"{STUB_DRIVER}\0".encode()
    for name, other in ((b"CUDAExecutionProvider\0", provider), (b"libcuda.so.1\0", driver)):
        assert (code.count(name), len(name)) == (1, len(other))
        code = code.replace(name, other)
    library.write_bytes(code)
    return library


@contextmanager
def emulated(stubs: Stubs, room: Callable[[int], int] | None = None) -> Iterator[list[Sizes]]:
    """The sizes of each launch; all are executed. room: see `execute_at`."""
    launches: list[Sizes] = []

    def execute(name: str, ptx: str, sizes: Sizes, arguments: list[int]) -> None:
        launches.append(sizes)
        types, kernel = shipped_as(ptx)
        *grid, threads, shared_bytes = sizes
        assert (name, threads, shared_bytes) == (kernel.name, kernel.threads, kernel.shared_bytes)
        x, y, z = grid
        execute_at(kernel, (x, y, z), arguments, types=types, room=room)

    stubs.execute_with(execute)
    yield launches
    stubs.execute_nothing()
    stubs.raise_errors()
