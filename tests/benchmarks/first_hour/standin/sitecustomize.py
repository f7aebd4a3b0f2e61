"""Python imports this when it starts: it puts a GPU that does not exist into the process of a step."""

# ruff: noqa: N802, N815 (the names are those of CUDA)

from __future__ import annotations

import enum
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def put_in_place() -> None:
    from runtimes.contract.engine import EngineFacts, Gpu, Profile, load_engine
    from runtimes.sessions.ort_gpu import driver
    from tests import fake_gpu
    from xl_export.tensorrt import build

    class Cuda(fake_gpu.FakeCuda):
        """With the functions that steps use besides: events, copies on the device, free memory."""

        cudaMemcpyKind = enum.Enum(
            "cudaMemcpyKind", ["cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"]
        )

        def __init__(self) -> None:
            super().__init__()
            self.times: dict[int, float] = {}

        def cudaMemGetInfo(self) -> tuple[Any, ...]:
            return self._ok("free", 1 << 33, 1 << 34)

        def cudaEventCreate(self) -> tuple[Any, ...]:
            return self._ok("event", len(self.times) + self.calls.get("event", 0) + 1)

        def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
            self.enqueue(lambda: self.times.update({event: time.perf_counter()}))
            return self._ok("record")

        def cudaEventSynchronize(self, event: int) -> tuple[Any, ...]:
            return self.cudaStreamSynchronize(0)

        def cudaEventElapsedTime(self, start: int, end: int) -> tuple[Any, ...]:
            return self._ok("elapsed", (self.times[end] - self.times[start]) * 1e3)

    def made(artefact: Path, out: Path, options: Any) -> EngineFacts:
        rows = (1, 1, options.batch[2])
        profiles = (
            Profile(name="segment", batch=rows, tokens=(1, 8, 8)),
            Profile(name="token", batch=rows, tokens=(1, 1, 1)),
        )
        facts = load_engine(fake_gpu.make_engine(artefact, out, profiles=profiles))[0]
        (out / build.LAYERS).write_text('{"Layers": ["a", "b"]}')
        return facts

    cuda = Cuda()
    tensorrt: Any = fake_gpu.FakeTensorRT(cuda)
    tensorrt.__name__, tensorrt.__spec__ = "tensorrt", ModuleSpec("tensorrt", None)  # as a module has
    sys.modules |= {"cuda.bindings.runtime": cuda, "tensorrt": tensorrt, "tensorrt_rtx": tensorrt}  # type: ignore[dict-item]
    gpu = Gpu(name=fake_gpu.GPU.name, compute_capability=fake_gpu.GPU.compute_capability)
    driver.ask_driver = lambda: driver.DriverFacts(gpus=(gpu,), cuda=(13, 0))
    build.build = made  # type: ignore[assignment]


OF_STEPS = ("benchmarks.first_hour.child", "benchmarks.first_hour.steps.outside.rtx_cache")
if any(name in sys.orig_argv for name in OF_STEPS):
    put_in_place()
