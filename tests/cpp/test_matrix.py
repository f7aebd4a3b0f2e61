"""Every architecture, form and precision in C++, with standard operators and with the fused one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from runtimes.contract.spec import FUSED, load_spec
from runtimes.contract.tensors import FORMS
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import KernelChoice
from tests.architectures import ARCHITECTURES
from tests.parity.operations import Program, Reference
from xl_export.artefact.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WIDE: dict[str, Any] = {"d_model": 64, "heads": 2, "head_dim": 32, "d_ff": 96}  # blocks of quantised weights
NO_FEED_FORWARD = ARCHITECTURES["all-attention"] | WIDE | {"d_ff": 0}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a run's sizes, and the options of its export
    **{name: (sizes, {}) for name, sizes in ARCHITECTURES.items()},
    **{
        f"{name} {form}": (ARCHITECTURES[name], {"memory": form})
        for name in (
            "transformer-xl",
            "adaptive-softmax",
            "adaptive-softmax-wide-first",
            "all-attention-groups",
        )
        for form in ("shift", "hidden")
    },
    **{
        f"{precision} {form}": (WIDE, {"precision": precision, "memory": form})
        for precision in ("fp16", "int8", "int4", "int8-stored")
        for form in FORMS
    },
    **{f"memory of halves {form}": ({}, {"memory_precision": "fp16", "memory": form}) for form in FORMS},
    "memory of bytes": ({}, {"memory_precision": "int8"}),
    "memory of bytes, two groups of heads": (
        ARCHITECTURES["all-attention-groups"],
        {"memory_precision": "int8"},
    ),
    "memory of bytes ort": ({}, {"memory_precision": "int8", "storage": "ort"}),
    **{
        f"{storage} {form}": ({}, {"storage": storage, "memory": form})
        for storage, form in (("ort", "shift"), ("ort", "ring"), ("single-file", "ring"))
    },
    "for the web": ({}, {"target": "web"}),
    "adaptive softmax for the web": (ARCHITECTURES["adaptive-softmax"], {"target": "web"}),
    "all-attention int8": (NO_FEED_FORWARD, {"precision": "int8"}),
    "all-attention int4": (NO_FEED_FORWARD, {"precision": "int4"}),
    "adaptive softmax int8": (ARCHITECTURES["adaptive-softmax"] | WIDE, {"precision": "int8"}),
}


@pytest.fixture(scope="module")
def library() -> Path:
    """The library of the fused operator."""
    return fused_cpu.build()


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_the_naive_reference(
    name: str, cpp: Program, library: Path, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    sizes, options = MODELS[name]
    run = make_run(**sizes)
    if "d_model" in sizes:  # as small as trained weights, or the sums of a wider model lose too many digits
        file = run / "model.safetensors"
        save_file({key: 0.4 * tensor for key, tensor in load_file(file).items()}, file)
    artefact = export(run, tmp_path / "artefact", **options)
    kernels: dict[KernelChoice, str] = {"standard": "", "fused": str(library)}
    if FUSED not in load_spec(artefact).files:
        del kernels["fused"]
    for kernel, fused in kernels.items():
        python, own = tmp_path / kernel / "python", tmp_path / kernel / "own"
        python.mkdir(parents=True), own.mkdir()
        reference = Reference.of(artefact, python, rounds="precision" in str(options), kernel=kernel)
        cpp.ask("open", model=str(artefact), fused=fused)
        assert "generate" in reference.check(cpp, own)
