"""What can be done with an engine besides stepping it: options of a build, refit, caches, NVIDIA's tool."""

from __future__ import annotations

import gc
import shlex
import shutil
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import sides
from benchmarks.gpu.sides import (
    BATCHES,
    SIDES,
    Graph,
    artefact_of,
    open_side,
    options_of,
    problems,
    scores,
)
from runtimes import Session, check, open_session
from runtimes.contract.engine import PLAN, Flavour
from runtimes.sessions.tensorrt.runtime_cache import VARIABLE
from tests.gpu.stand_ins import TINY, on_gpu
from xl_export.deployment.refit import refit
from xl_export.tensorrt.options import TARGETS, BuildOptions
from xl_export.tensorrt.trtexec import LINE, TOOLS

GRAPH = Graph(target="tensorrt", precision="fp16")
OPTIONS: dict[str, dict[str, Any]] = {
    "same-capability": {"hardware": "same-capability"},
    "ampere-plus": {"hardware": "ampere-plus"},
    "version-compatible": {"version_compatible": True},
    "workspace-mib": {"workspace_mib": 64},
    "optimization-level": {"optimization_level": 5},
}


@pytest.mark.parametrize(
    ("gpu", "changes"), on_gpu(OPTIONS, {"workspace-mib": OPTIONS["workspace-mib"]}), indirect=["gpu"]
)
def test_an_engine_passes_its_check_with_each_option(
    gpu: Any, changes: dict[str, Any], work: Path, tmp_path: Path
) -> None:
    artefact = artefact_of(work, TINY, GRAPH)
    sides.build(artefact, tmp_path / "engine", replace(options_of("tensorrt"), **changes))
    report = check(tmp_path / "engine")
    assert report.passed, report.sentence


@pytest.mark.gpu
def test_a_timing_cache_is_written_and_used_again(gpu: Any, work: Path, tmp_path: Path) -> None:
    options = replace(options_of("tensorrt"), timing_cache=tmp_path / "timing.cache")
    for name in ("first", "second"):
        sides.build(artefact_of(work, TINY, GRAPH), tmp_path / name, options)
        assert (tmp_path / "timing.cache").stat().st_size > 0
        assert check(tmp_path / name).passed


@pytest.mark.gpu
def test_an_engine_is_refitted_with_other_weights(gpu: Any, work: Path, tmp_path: Path) -> None:
    options = replace(options_of("tensorrt"), refit=True)
    sides.build(artefact_of(work, TINY, GRAPH), tmp_path / "engine", options)
    refit(tmp_path / "engine", artefact_of(work, TINY, GRAPH, seed=1), tmp_path / "refitted")
    report = check(tmp_path / "refitted")
    assert report.passed, report.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["ring", "shift"])
def test_an_rtx_engine_for_every_gpu_runs_on_this_one(
    gpu: Any, form: Any, work: Path, tmp_path: Path
) -> None:
    artefact = artefact_of(work, TINY, replace(GRAPH, form=form))
    options = BuildOptions(flavour="rtx", compute_capabilities=TARGETS)
    facts = sides.build(artefact, tmp_path / "engine", options)
    assert facts.compute_capabilities == TARGETS
    report = check(tmp_path / "engine")
    assert report.passed, report.sentence


@pytest.mark.parametrize(("gpu", "flavour"), on_gpu({"rtx": "rtx"}, {"rtx": "rtx"}), indirect=["gpu"])
def test_what_rtx_compiles_is_kept_for_the_next_session(
    gpu: Any, flavour: Flavour, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(cache))
    sides.build(artefact_of(work, TINY, GRAPH), tmp_path / "engine", options_of(flavour))
    answers = []
    for _ in range(2):
        answers.append(scores(open_session(tmp_path / "engine"), [8, 1, 1, 1]))
        gc.collect()  # the cache is written when the session is gone
        (file,) = cache.iterdir()
        assert file.stat().st_size > 0
    # Kernels for other shapes may be compiled later, and add in another order.
    assert np.abs(answers[0] - answers[1]).max() <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", TOOLS)
def test_nvidias_tool_builds_the_plan_and_times_ours(
    gpu: Any, flavour: Flavour, work: Path, tmp_path: Path
) -> None:
    tool = TOOLS[flavour]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on the PATH; NVIDIA's archives and containers have it, and pip has not")
    engine, elsewhere = tmp_path / "engine", tmp_path / "elsewhere"
    elsewhere.mkdir()
    facts = sides.build(artefact_of(work, TINY, GRAPH), engine, options_of(flavour))
    building, *timing = (engine / LINE).read_text("utf-8").splitlines()
    _printed(building, elsewhere)
    assert (elsewhere / PLAN).stat().st_size > 0
    assert len(timing) == len(facts.profiles)
    for line in timing:
        assert "GPU Compute Time:" in _printed(line, engine)


def _printed(line: str, folder: Path) -> str:
    words = shlex.split(line)
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    print(printed)
    assert done.returncode == 0, [text for text in printed.splitlines() if "[E]" in text]
    return printed


STEPS, SAMPLES = 10_000, 40  # readings of the device memory
WARM_UP = 0.2  # part of the steps in which every shape occurs, and caches may grow
MOST_MIB = 8.0  # of growth after the warm-up; other programs move it a little
GROWING = {
    name: name for name in ("tensorrt-plugin-ring-fp16", "tensorrt-native-ring-fp16", "cuda-ring-fp32")
}


@pytest.mark.parametrize(
    ("gpu", "name"),
    on_gpu(GROWING, {"tensorrt-native-ring-fp16": "tensorrt-native-ring-fp16"}),
    indirect=["gpu"],
)
def test_device_memory_does_not_grow_with_changing_shapes(gpu: Any, name: str, work: Path) -> None:
    """TensorRT leaks a CUDA module at each change of shape of a plugin (NVIDIA/TensorRT#4849)."""
    (side,) = [side for side in SIDES if side.name == name]
    opened = open_side(side, TINY, work)
    grown = _growth(opened.session, 60 if gpu else STEPS)
    assert grown <= MOST_MIB
    if not gpu:
        assert problems(opened) == []


def _growth(session: Session, steps: int) -> float:
    """MiB of device memory that steps of changing shapes use more at their end than after the warm-up."""
    draw = np.random.default_rng(0)
    memories = {batch: session.start(batch) for batch in range(1, max(BATCHES) + 1)}
    samples = [_free_mib()]
    for number in range(steps):
        batch = int(draw.integers(1, max(BATCHES) + 1))
        tokens = int(draw.integers(1, session.rule.segment + 1))
        text = draw.integers(0, session.vocab.size, (batch, tokens + 1))
        found, memories[batch] = session.score(text[:, :-1], text[:, 1:], memories[batch])
        assert np.isfinite(found).all()
        if (number + 1) % max(1, steps // SAMPLES) == 0:
            samples.append(_free_mib())
    print("free MiB:", samples)
    return samples[int(WARM_UP * (len(samples) - 1))] - samples[-1]


def _free_mib() -> float:
    cuda = import_module("cuda.bindings.runtime")
    problem, free, _ = cuda.cudaMemGetInfo()
    assert problem == cuda.cudaError_t.cudaSuccess
    return float(free) / 2**20
