"""The steps of the first hour, in their order: what comes early needs little and says most."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runtimes.base.errors import ConfigError

STEPS_ARE = "benchmarks.first_hour.steps"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. target: the module and the function that does it. options: the arguments of the function.

    minutes: its limit. gpu: whether it needs an NVIDIA GPU.
    """

    name: str
    title: str
    target: str
    minutes: float = 10
    gpu: bool = True
    options: dict[str, str | int | bool] = field(default_factory=dict)


def _step(name: str, title: str, function: str, minutes: float, *, gpu: bool = True, **options: str) -> Step:
    target = f"{STEPS_ARE}.{function}"
    return Step(name=name, title=title, target=target, minutes=minutes, gpu=gpu, options=dict(options))


def _engine(size: str, flavour: str, attention: str, form: str, precision: str, minutes: float = 6) -> Step:
    name = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX"}[flavour]
    return _step(
        f"engine-{size}-{flavour}-{attention}-{form}-{precision}",
        f"{size}: {name} engine, {attention} attention, {form} memory, {precision}",
        "engines:run",
        minutes,
        size=size,
        flavour=flavour,
        attention=attention,
        form=form,
        precision=precision,
    )


def _onnx_attention(step: Step) -> Step:
    """The same engine from a graph in which attention is ONNX Attention, for TensorRT's fused kernels."""
    return replace(
        step,
        name=f"{step.name}-onnx-attention",
        title=f"{step.title}, from ONNX Attention",
        options={**step.options, "written": "native"},
    )


def _provider(
    size: str,
    device: str,
    precision: str,
    minutes: float = 6,
    *,
    memory: str = "fp32",
    mask: str = "same-length",
) -> Step:
    other = "" if memory == "fp32" else f"-memory-{memory}"
    other += "" if mask == "same-length" else f"-mask-{mask}"
    names = {"cuda": "CUDA", "ort-tensorrt": "TensorRT", "ort-tensorrt-rtx": "TensorRT-RTX"}
    return _step(
        f"{device}-{size}-{precision}{other}",
        f"{size}: ONNX Runtime's {names[device]} provider, {precision}{other.replace('-', ' ')}",
        "providers:run",
        minutes,
        size=size,
        device=device,
        precision=precision,
        memory=memory,
        mask=mask,
    )


def _trtexec(flavour: str) -> Step:
    tool = {"tensorrt": "trtexec", "rtx": "tensorrt_rtx"}[flavour]
    return _step(
        f"trtexec-{flavour}",
        f"the lines of trtexec.txt, where {tool} is on the PATH",
        "outside.trtexec:run",
        8,
        flavour=flavour,
    )


def _pytorch(size: str, minutes: float = 8) -> Step:
    return _step(f"pytorch-{size}", f"{size}: PyTorch, eager and compiled", "pytorch:run", minutes, size=size)


def _shapes(what: str, title: str) -> Step:
    return _step(
        f"shapes-{what}", f"ten thousand steps of changing shapes: {title}", "shapes:run", 8, what=what
    )


STEPS: tuple[Step, ...] = (
    _step("machine", "the machine, its driver and its packages", "machine:run", 2, gpu=False),
    _step("limits", "what the GPU can do at best: copies, products, launches", "limits:run", 3),
    _step("tests", "the project's own tests on the GPU", "tests:run", 10),
    _step("embedded", "the PTX of an engine through the CUDA driver", "embedded:run", 12),
    _step(
        "rtx-ahead",
        "TensorRT-RTX engines for every GPU, built ahead",
        "building.ahead:run",
        8,
        gpu=False,
    ),
    _provider("small", "cuda", "fp32"),
    _provider("small", "cuda", "fp16"),
    _provider("small", "cuda", "int8"),
    _provider("small", "cuda", "int8-stored"),
    _provider("small", "cuda", "int4"),
    _provider("small", "cuda", "fp32", memory="fp16"),
    _provider("small", "cuda", "fp32", memory="int8"),
    _provider("small", "cuda", "fp32", mask="full"),
    _step(
        "commands",
        "eval, score and generate of a run and of an artefact",
        "commands:run",
        6,
        size="small",
        devices="cuda,auto",
    ),
    _engine("small", "tensorrt", "native", "ring", "fp16"),
    _onnx_attention(_engine("small", "tensorrt", "native", "ring", "fp16")),
    _engine("small", "tensorrt", "native", "shift", "fp16"),
    _engine("small", "tensorrt", "native", "ring", "fp32"),
    _engine("small", "tensorrt", "native", "ring", "int8"),
    _engine("small", "tensorrt", "native", "ring", "int4"),
    _engine("small", "tensorrt", "native", "ring", "fp8"),
    _engine("small", "tensorrt", "plugin", "ring", "fp16"),
    _engine("small", "tensorrt", "plugin", "shift", "fp16"),
    _engine("small", "tensorrt", "plugin", "ring", "fp32"),
    _engine("small", "tensorrt", "native", "shift", "fp32"),
    _engine("small", "rtx", "native", "ring", "fp16"),
    _onnx_attention(_engine("small", "rtx", "native", "ring", "fp16")),
    _engine("small", "rtx", "native", "shift", "fp16"),
    _engine("small", "rtx", "native", "ring", "fp32"),
    _engine("small", "rtx", "native", "shift", "fp32"),
    _engine("small", "rtx", "native", "ring", "int8"),
    _engine("small", "rtx", "native", "ring", "int4"),
    _engine("small", "rtx", "native", "ring", "fp8"),
    _step(
        "build-options",
        "each option of a build alone, and refit",
        "building.build_options:run",
        10,
    ),
    _step(
        "rtx-cache",
        "what TensorRT-RTX compiles, kept for the next process",
        "outside.rtx_cache:run",
        6,
    ),
    _trtexec("tensorrt"),
    _trtexec("rtx"),
    _provider("small", "ort-tensorrt", "fp16"),
    _provider("small", "ort-tensorrt", "fp32"),
    _provider("small", "ort-tensorrt-rtx", "fp16"),
    _provider("small", "ort-tensorrt-rtx", "fp32"),
    _shapes("plugin", "an engine with the project's kernels (NVIDIA/TensorRT#4849)"),
    _shapes("native", "an engine with TensorRT's own kernels"),
    _shapes("cuda", "ONNX Runtime's CUDA provider"),
    _step("attention", "attention alone: the kernels, PyTorch and FlexAttention", "attention:run", 8),
    _engine("enwik8-base", "tensorrt", "native", "ring", "fp16"),
    _onnx_attention(_engine("enwik8-base", "tensorrt", "native", "ring", "fp16")),
    _engine("enwik8-base", "tensorrt", "plugin", "ring", "fp16"),
    _engine("enwik8-base", "tensorrt", "plugin", "shift", "fp16"),
    _engine("enwik8-base", "tensorrt", "native", "ring", "int8"),
    _engine("enwik8-base", "rtx", "native", "ring", "fp16"),
    _provider("enwik8-base", "cuda", "fp32"),
    _provider("enwik8-base", "cuda", "fp16"),
    _pytorch("enwik8-base"),
    _step("training", "training steps: fp32, bf16, compiled, with fewer activations", "training:run", 10),
    _step("nccl", "training in several processes, one for each GPU", "training:several", 5),
    _engine("wt103-base", "tensorrt", "native", "ring", "fp16", 10),
    _engine("wt103-base", "tensorrt", "plugin", "ring", "fp16", 10),
    _provider("wt103-base", "cuda", "fp32", 10),
    _pytorch("wt103-base"),
    _engine("text8-large", "tensorrt", "native", "ring", "fp16", 12),
    _engine("text8-large", "tensorrt", "plugin", "ring", "fp16", 12),
    _provider("text8-large", "cuda", "fp16", 12),
    _pytorch("text8-large"),
    _provider("enwik8-base", "ort-tensorrt", "fp16"),
    _provider("enwik8-base", "ort-tensorrt-rtx", "fp16"),
)
FIRST = STEPS[0]  # says whether there is a GPU; it belongs to every report


def chosen_steps(patterns: str | None) -> tuple[Step, ...]:
    """The steps whose names match one of the patterns with commas between them, in their order.

    The first step is always among them; None stands for all. Raises ConfigError for a pattern without a
    step.
    """
    if patterns is None:
        return STEPS
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted or [patterns]:
        if not _matching(pattern, STEPS):
            raise ConfigError(
                f"--steps has {pattern!r:.60}, which is no step; `python -m benchmarks first-hour --list` "
                "shows them all, and * stands for any letters, as in engine-small-*."
            )
    return tuple(step for step in STEPS if step is FIRST or any(_matching(p, [step]) for p in wanted))


def _matching(pattern: str, steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if fnmatch.fnmatchcase(step.name, pattern)]
