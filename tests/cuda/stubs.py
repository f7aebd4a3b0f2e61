"""Stub CUDA libraries for ONNX Runtime's real CUDA provider: compiled, loaded, and read as a log of calls."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.once import made_in

SOURCE = Path(__file__).with_name("stubs.cpp")
# The library that holds all functions; the others hold only their name and version.
WHOLE = "libcudart.so.13"
DRIVER = "libcuda.so.1"
STUB_DRIVER = "libstub.so.1"  # the driver under another name, so that no test takes it for NVIDIA's
CUDNN = "libcudnn.so.9"  # which the provider opens itself when it needs it
EXECUTOR = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_int,
)


@dataclass(frozen=True)
class Event:
    """One call of a counted function."""

    kind: str
    """kernel, product, copy, fill, wait or graph."""
    name: str
    """Of the kernel or function; the type of a product; the direction of a copy."""
    num_bytes: int
    source: int
    """The address that a copy reads."""
    target: int
    """The address that a copy or fill writes."""
    captured: bool
    """Whether it became a part of a CUDA graph, instead of running."""


@dataclass(frozen=True)
class StubGpu:
    """What the node reads of a GPU."""

    multiprocessors: int
    capability: int
    """Compute capability: 75 for 7.5."""
    shared_bytes: int
    """Shared memory of a multiprocessor."""


A100 = StubGpu(108, 80, 167936)


class Stubs:
    """The loaded libraries. path: of the one that holds the log."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cuda_log.restype = ctypes.c_char_p
        self._library.cuda_room.restype = ctypes.c_size_t
        self._library.cuda_room.argtypes = [ctypes.c_void_p]
        self.set_gpu(A100)

    def execute_with(self, execute: Callable[[str, str, tuple[int, ...], list[int]], None]) -> None:
        """Executes kernels that came as PTX: name, text, sizes (grid, threads, shared bytes) and arguments.

        An error cannot pass through the library; `raise_errors` raises it.
        """

        def run(name: bytes, ptx: bytes, sizes: Any, arguments: Any, count: int) -> None:
            try:
                execute(name.decode(), ptx.decode(), tuple(sizes[:5]), list(arguments[:count]))
            except BaseException as error:
                self._errors.append(error)

        self._errors: list[BaseException] = []
        self._executor = EXECUTOR(run)  # must live as long as the library may call it
        self._library.cuda_execute_with(self._executor)

    def execute_nothing(self) -> None:
        """Ends `execute_with`."""
        self._library.cuda_execute_with(None)

    def raise_errors(self) -> None:
        """Raises the first error of a kernel."""
        for error in self._errors:
            raise error

    def set_gpu(self, gpu: StubGpu) -> None:
        """Replaces the GPU, which is A100 until then."""
        self._library.cuda_set_gpu(gpu.multiprocessors, gpu.capability, gpu.shared_bytes)

    def room(self, address: int) -> int:
        """Bytes from an address to the end of the allocation that holds it; 0 if there is none."""
        return int(self._library.cuda_room(address))

    def on_device(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array in an allocation of its size."""
        address = ctypes.c_void_p()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes)) == 0
        memory = (ctypes.c_uint8 * array.nbytes).from_address(address.value or 0)
        copy = np.frombuffer(memory, array.dtype).reshape(array.shape)
        copy[:] = array
        return copy

    def forget(self) -> None:
        """Empties the log."""
        self._library.cuda_forget()

    def events(self) -> list[Event]:
        """The log since `forget`."""
        rows = [line.split("\t") for line in self._library.cuda_log().decode().splitlines()]
        return [
            Event(kind, name, int(num_bytes), int(source), int(target), captured == "1")
            for kind, name, num_bytes, source, target, captured in rows
        ]


@functools.cache
def load_all() -> Stubs:
    """Builds what the installed CUDA provider of ONNX Runtime needs, and loads it for this process."""
    import onnxruntime

    provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    with tempfile.TemporaryDirectory() as folder:
        libraries = build(provider, Path(folder))
        for path in (libraries[WHOLE], *libraries.values()):  # the others need that one
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return Stubs(libraries[WHOLE])


def built_driver() -> Path:
    """STUB_DRIVER, compiled unless build/ has it."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(__file__).parents[2] / "build" / f"stub-driver-{key}"
    return made_in(folder, lambda to: _compile(to / STUB_DRIVER, [], str(SOURCE))) / STUB_DRIVER


def build(provider: Path, folder: Path) -> dict[str, Path]:
    """Compiles the libraries that the provider links to, and returns them by name."""
    libraries = re.findall(r"\(NEEDED\).*\[(libcu.*)\]", _printed("readelf", "-dW", str(provider)))
    libraries.append(CUDNN)
    wanted = {library: list[str]() for library in libraries}
    for line in _printed("nm", "-D", "--undefined-only", str(provider)).splitlines():
        name, _, library = line.split()[-1].partition("@")
        if name.lstrip("_").startswith("cu"):
            wanted[library or DRIVER].append(name)  # the driver's functions have no version
    written = SOURCE.read_text()
    missing = sorted(name for names in wanted.values() for name in names if f"{name}(" not in written)
    generated = folder / "generated.cpp"
    generated.write_text("".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in missing))
    nothing = folder / "nothing.cpp"
    nothing.touch()
    whole = folder / WHOLE
    versions = [_node(library, names) for library, names in wanted.items() if library not in (DRIVER, CUDNN)]
    _compile(whole, versions, str(SOURCE), str(generated))
    for library in libraries:
        if library != WHOLE:
            versions = [] if library in (DRIVER, CUDNN) else [_node(library, [])]
            _compile(folder / library, versions, str(nothing), "-Wl,--no-as-needed", str(whole))
    return {library: folder / library for library in libraries}


def _node(library: str, names: list[str]) -> str:
    return f"{library} {{ {' '.join(f'{name};' for name in names)} }};\n"


def _compile(library: Path, versions: list[str], *arguments: str) -> None:
    script = library.with_suffix(".map")
    script.write_text("".join(versions))
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-o", str(library), *arguments]
    command.append(f"-Wl,-soname,{library.name}")
    if versions:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def _printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
