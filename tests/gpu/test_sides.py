"""Engines, providers and PyTorch on a GPU answer as the CPU does, in every form and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sides
from benchmarks.gpu.sides import SIDES, Opened, Side, open_side, problems
from runtimes import open_session
from tests.architectures import ARCHITECTURES
from tests.gpu.stand_ins import TINY, on_gpu
from xl_export.artefact.export import export

TABLE = {side.name: side for side in SIDES}
ENGINE = TABLE["tensorrt-native-ring-fp16"]
# The CPU in place of ONNX Runtime's CUDA provider.
CPU = ("cuda-ring-fp32-memory-int8", "cuda-shift-fp32-mask-full")
STAND_INS = {name: TABLE[name] for name in (ENGINE.name, "rtx-native-shift-fp32")} | {
    name: replace(TABLE[name], device="cpu") for name in CPU
}


@pytest.mark.parametrize(("gpu", "side"), on_gpu(TABLE, STAND_INS), indirect=["gpu"])
def test_a_side_answers_as_the_cpu(gpu: Any, side: Side, work: Path) -> None:
    opened = open_side(side, TINY, work)
    assert opened.session.rule.mask == side.graph.mask
    assert problems(opened) == []


KINDS = (
    ENGINE,
    TABLE["tensorrt-plugin-ring-fp16"],
    TABLE["tensorrt-plugin-shift-fp16"],
    TABLE["rtx-native-ring-fp16"],
)
NAMES = ("transformer-xl", "adaptive-softmax", "all-attention-groups", "adaptive-span-full", "head-split")
MODELS = {f"{kind.name}-{name}": (kind, name) for kind in KINDS for name in NAMES}


@pytest.mark.parametrize(("gpu", "model"), on_gpu(MODELS, dict([*MODELS.items()][1:2])), indirect=["gpu"])
def test_an_engine_of_an_architecture_answers_as_the_cpu(
    gpu: Any, model: tuple[Side, str], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    side, name = model
    assert side.flavour is not None
    run = make_run(**{"head_dim": 16, **ARCHITECTURES[name]})
    # A model without a ring has the form that the export chooses.
    form = "shift" if side.graph.form == "shift" else None
    attention = side.attention
    artefact = export(run, tmp_path / "artefact", target="tensorrt", attention=attention, memory=form)
    facts = sides.build(artefact, tmp_path / "engine", sides.options_of(side.flavour, attention))
    assert gpu or (facts.plugin_layers > 0) == (attention == "plugin")
    opened = Opened(
        folder=tmp_path / "engine",
        session=open_session(tmp_path / "engine"),
        reference=open_session(artefact, device="cpu"),
        tolerance=2e-2,
        device="auto",
        built="yes",
    )
    assert problems(opened) == []


@pytest.mark.parametrize(
    ("gpu", "name"),
    on_gpu({name: name for name in sides.MODELS}, {"pytorch-fp32": "pytorch-fp32"}),
    indirect=["gpu"],
)
def test_pytorch_on_a_gpu_answers_as_the_cpu(gpu: Any, name: str, work: Path) -> None:
    _, difference, tolerance = sides.model_on(name, TINY, work, "cpu" if gpu else "cuda")
    assert difference <= tolerance


@pytest.mark.parametrize(
    ("gpu", "name"),
    on_gpu(
        {name: name for name in sides.TRAININGS},
        {"training-fp32": "training-fp32"},
    ),
    indirect=["gpu"],
)
def test_training_on_a_gpu_has_the_losses_of_the_cpu(gpu: Any, name: str) -> None:
    difference, tolerance = sides.training_difference(name, "cpu" if gpu else "cuda")
    assert difference <= tolerance
