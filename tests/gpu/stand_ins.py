"""What tests for a GPU run on: a real GPU with `-m gpu`, and for some rows of a table the stand-in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.configs import BenchmarkConfig
from benchmarks.gpu import sides
from runtimes.contract.engine import EngineFacts, Profile, load_engine
from tests import fake_gpu
from trainer.model.config import ModelConfig
from xl_export.tensorrt.build import LAYERS
from xl_export.tensorrt.options import BuildOptions

TINY = BenchmarkConfig(
    name="tiny-gpu",
    # Heads are 16 wide: TensorRT-RTX has no fused attention for narrower ones.
    model=ModelConfig(layers=2, d_model=32, heads=2, head_dim=16, d_ff=64, vocab_size=256),
    segment=8,
    mem_len=24,
    repeats=3,
    token_repeats=6,
    training_batch=2,
)


def on_gpu(rows: Mapping[str, Any], stand_ins: Mapping[str, Any]) -> list[Any]:
    """Parameters `("gpu", "row")` of a test: all rows on a real GPU, and some on the stand-in."""
    real = [pytest.param("real", row, id=name, marks=pytest.mark.gpu) for name, row in rows.items()]
    return real + [pytest.param("stand-in", row, id=f"stand-in-{name}") for name, row in stand_ins.items()]


def install(patch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for CUDA and both flavours of TensorRT; an engine is one that ONNX Runtime runs."""

    def build(artefact: Path, out: Path, options: BuildOptions) -> EngineFacts:
        rows = (1, 1, options.batch[2])
        profiles = (
            Profile(name="segment", batch=rows, tokens=(1, 8, 8)),
            Profile(name="token", batch=rows, tokens=(1, 1, 1)),
        )
        fake_gpu.make_engine(artefact, out, profiles=profiles, flavour=options.flavour)
        (out / LAYERS).write_text('{"Layers": ["a", "b"]}')
        return load_engine(out)[0]

    patch.setattr(sides, "build", build)
    cuda: Any = fake_gpu.install(patch)
    cuda.cudaMemGetInfo = lambda: (cuda.cudaError_t.cudaSuccess, 1 << 33, 1 << 34)
    patch.setitem(sys.modules, "tensorrt_rtx", sys.modules["tensorrt"])
    return cuda
