"""The check of an engine compares every way in which it computes a step, over a stand-in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check
from runtimes.base.errors import StreamError
from runtimes.contract.engine import Profile
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export

FP32: dict[str, Any] = {"target": "tensorrt", "precision": "fp32", "attention": "native"}


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeCuda:
    return fake_gpu.install(monkeypatch)


def profiles(segment: int, token: int) -> tuple[Profile, Profile]:
    """Two profiles of one batch each."""
    return (
        Profile(name="segment", batch=(segment,) * 3, tokens=(1, 8, 8)),
        Profile(name="token", batch=(token,) * 3, tokens=(1, 1, 1)),
    )


@pytest.mark.parametrize(
    ("form", "sizes", "paths"),
    [
        ("shift", (2, 2), 6),  # two profiles in two directions; single tokens as graphs too
        ("ring", (2, 2), 3),
        ("ring", (2, 1), 3),  # rows that only one profile takes
        ("shift", (4, 3), 5),  # more rows than the reference has; only the first token of three has no graph
    ],
)
def test_every_path_is_compared(
    form: str, sizes: tuple[int, int], paths: int, cut_ring: Path, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    artefact = cut_ring if form == "ring" else artefacts[form]
    report = check(fake_gpu.make_engine(artefact, tmp_path / "engine", profiles=profiles(*sizes)))
    assert report.passed, report
    assert (report.paths, report.missing) == (paths, ())
    assert report.sentence.endswith(f"; all {paths} ways to compute a step were compared")
    assert report.to_json()["paths"] == paths


def test_selective_logits_are_separate_paths(make_run: Callable[..., Path], tmp_path: Path) -> None:
    artefact = export(make_run(**ARCHITECTURES["adaptive-softmax"]), tmp_path / "artefact", **FP32)
    report = check(fake_gpu.make_engine(artefact, tmp_path / "engine", profiles=profiles(2, 2)))
    assert report.passed, report
    assert report.paths == 4


@pytest.mark.parametrize("wrong", ["graph", "second buffers"])
def test_an_error_in_only_one_path_is_found(
    wrong: str, artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments and the other direction stay right: a check of some steps could pass."""
    engine = fake_gpu.make_engine(artefacts["shift"], tmp_path / "engine", profiles=profiles(2, 2))
    compute = fake_gpu._Context._compute
    captures: list[dict[str, int]] = []

    def spoiled(self: Any, addresses: dict[str, int], shapes: Any, changes: int) -> None:
        compute(self, addresses, shapes, changes)
        if shapes["input_ids"][1] > 1:
            return
        known = addresses in captures
        captures.append(addresses)
        if wrong == "graph" and not known:
            return
        first = captures[0]["present.0.key"] == addresses["present.0.key"]
        if wrong == "second buffers" and first:
            return
        fake_gpu._view(addresses["logits"], (2, 1, 1), np.float32)[...] += 1

    monkeypatch.setattr(fake_gpu._Context, "_compute", spoiled)
    report = check(engine)
    assert not report.passed
    assert report.missing == ()
    assert report.max_difference > 0.01


def test_an_unreachable_path_fails_the_check_and_is_named(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Under the full mask the reference's own segments are needed, and no profile takes them in one row."""
    artefact = export(make_run(**ARCHITECTURES["adaptive-span-full"]), tmp_path / "artefact", **FP32)
    report = check(fake_gpu.make_engine(artefact, tmp_path / "engine", profiles=profiles(2, 1)))
    assert not report.passed
    assert report.max_difference < report.tolerance
    assert (
        "3 of 5 ways to compute a step were not reached: profile token, run without a graph"
        in report.sentence
    )


def test_an_engine_that_rejects_its_reference_is_named(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_ring: Path
) -> None:
    engine = fake_gpu.make_engine(cut_ring, tmp_path / "engine")
    monkeypatch.setattr(fake_gpu._Context, "set_input_shape", lambda *_: False)
    with pytest.raises(StreamError, match=r"no stream of its reference \(input_ids .* does not fit"):
        check(engine)
    no_room = (fake_gpu.FakeCuda.cudaError_t.cudaErrorMemoryAllocation, 0)
    monkeypatch.setattr(fake_gpu.FakeCuda, "cudaMalloc", lambda *_: no_room)
    with pytest.raises(StreamError, match=r"no stream of its reference \(the GPU has no room for 0 MiB"):
        check(engine)
