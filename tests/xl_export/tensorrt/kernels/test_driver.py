"""The embedded PTX goes through the CUDA driver with the grids and arguments of an engine. A stand-in for the
driver executes it on the CPU (`tests/ptx`); `pytest -m gpu` executes it on a GPU.
"""

# ruff: noqa: N802 (the names are those of CUDA)

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.base.errors import ArtefactError
from tests.ptx.driver import execute
from tests.ptx.machine import POISON, GlobalMemory
from tests.ptx.program import parse
from xl_export.tensorrt.kernels import driver as module
from xl_export.tensorrt.kernels.cases import Case
from xl_export.tensorrt.kernels.compile import JOINS, tactics
from xl_export.tensorrt.kernels.driver import LAUNCHES, TOLERANCES, Driver, naive_answer, run_embedded

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("compiled_once")
CASE = Case(B=2, T=3, M=400, K=16, R=23, first=(0, 450), slot=(400, 3), spare=4, persistent=2, N=2)
MULTIPROCESSORS = 4


class FakeDriver:
    """`cuda.bindings.driver` with one GPU, whose kernels are executed on the CPU."""

    CUresult = enum.Enum("CUresult", ["CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_PTX"])
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=MULTIPROCESSORS,
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        self.addresses: set[int] = set()
        self.modules: list[str] = []
        self.result = self.CUresult.CUDA_SUCCESS
        self.grids: list[tuple[str, tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not re.fullmatch(r"cu(Init|(Ctx|Event|Stream|Graph)\w+|DevicePrimaryCtxRetain|DeviceGet)", name):
            raise AttributeError(name)
        values = {"cuEventElapsedTime": (0.5,), "cuInit": (), "cuCtxSetCurrent": ()}.get(name, (7,))
        return lambda *_: (self.result, *values)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self.result, b"A GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self.result, attribute

    def cuModuleLoadData(self, text: bytes) -> tuple[Any, ...]:
        assert text.endswith(b"}\n\0") or text.rstrip(b"\0\n ").endswith(b"}"), text[-40:]
        self.modules.append(text.decode())
        return self.result, text.decode()

    def cuModuleUnload(self, text: str) -> tuple[Any, ...]:
        self.modules.remove(text)
        return (self.result,)

    def cuModuleGetFunction(self, text: str, name: bytes) -> tuple[Any, ...]:
        entry = re.search(rf"\.entry {name.decode()}\(", text)
        return self.result, (name.decode(), text) if entry else None

    def cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:
        address = self.memory.allocate(num_bytes)
        self.addresses.add(address)
        return self.result, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.addresses.remove(address)
        return (self.result,)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> tuple[Any, ...]:
        assert value == POISON  # which is in new memory
        return (self.result,)

    def cuMemcpyHtoD(self, target: int, source: int, num_bytes: int) -> tuple[Any, ...]:
        content = (ctypes.c_uint8 * num_bytes).from_address(source)
        self.memory.upload(target, np.frombuffer(content, np.uint8))
        return (self.result,)

    def cuMemcpyDtoH(self, target: int, source: int, num_bytes: int) -> tuple[Any, ...]:
        answer = self.memory.download(source, num_bytes)
        ctypes.memmove(target, answer.ctypes.data, num_bytes)
        return (self.result,)

    def cuLaunchKernel(self, function: tuple[str, str], *given: Any) -> tuple[Any, ...]:
        (name, ptx), grid, block, (shared, stream, arguments, extra) = (
            function,
            given[:3],
            given[3:6],
            given[6:],
        )
        values, kinds = arguments
        declared = re.findall(r"\.param \.(\w+) ", ptx.split(f".entry {name}(")[1].split(")")[0])
        assert [{"u64": ctypes.c_void_p, "u32": ctypes.c_int32}[kind] for kind in declared] == list(kinds)
        assert block == (int(re.search(r"\.reqntid (\d+)", ptx)[1]), 1, 1)  # type: ignore[index]
        assert (stream, extra) == (7, 0)
        assert 0 <= shared <= 48 << 10
        self.grids.append((name, grid))
        execute(parse(ptx, name), values, grid=grid, shared_bytes=shared, memory=self.memory)
        return (self.result,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(module, "import_module", lambda name: made)
    return made


def test_the_ptx_is_launched_as_engines_do(fake: FakeDriver) -> None:
    got = run_embedded(
        Driver(),
        CASE.inputs(),
        CASE.attributes,
        mem_len=CASE.mem_len,
        tactic=tactics(CASE.K, 80)[0],
        join=JOINS[0],
        repeats=2,
    )
    assert np.abs(got.answer - naive_answer(CASE)).max() <= TOLERANCES[CASE.dtype]
    assert got.milliseconds == (0.5 / LAUNCHES, 0.5 / LAUNCHES)
    rows = CASE.B * CASE.H
    once = [("token_attention", (rows, CASE.T, 2)), ("join_parts", (rows * CASE.T, 1, 1))]
    assert fake.grids == (1 + LAUNCHES) * once  # for the answer, and in the graph that is timed
    assert (fake.addresses, fake.modules) == (set(), [])


def test_what_the_driver_refuses_is_one_sentence(fake: FakeDriver) -> None:
    driver = Driver()
    assert (driver.gpu.name, driver.gpu.compute_capability) == ("A GPU", "8.0")
    fake.result = fake.CUresult.CUDA_ERROR_INVALID_PTX
    with pytest.raises(ArtefactError, match="driver reports CUDA_ERROR_INVALID_PTX for cuMemAlloc"):
        driver.empty(4)
    fake.result = fake.CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(ArtefactError, match=r"no NVIDIA GPU .* \(CUDA_ERROR_NO_DEVICE\)"):
        Driver()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_driver_the_real_bindings_lead_to_a_sentence() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(ArtefactError, match="no NVIDIA GPU can be used here"):
        Driver()


def test_every_name_of_the_driver_is_in_the_real_bindings() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    source = Path(str(module.__file__)).read_text()
    functions = set(re.findall(r'"(cu[A-Z]\w+)"', source)) | set(re.findall(r"_cuda\.(cu[A-Z]\w+)", source))
    assert len(functions) > 15
    assert [name for name in functions if not hasattr(real, name)] == []
    for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"):
        assert hasattr(real.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    assert real.CUresult.CUDA_SUCCESS == 0
