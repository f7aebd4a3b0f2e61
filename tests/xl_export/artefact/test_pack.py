"""Artefacts of one file: the same answers, the same promises, and what such a file cannot hold."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check, generate, load_memory, open_session, save_memory
from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.sealed import file_facts
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import (
    FUSED,
    FUSED_ORT,
    GRAPH,
    OPERATORS,
    ORT_GRAPH,
    WEIGHTS,
    Spec,
    load_spec,
    save_spec,
)
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from tests.commands import refused, xl
from tests.sealing import identity
from xl_export.artefact import pack as packing
from xl_export.artefact.export import export
from xl_export.artefact.pack import refuse_too_many

FILES = {"single-file": {GRAPH}, "ort": {ORT_GRAPH, OPERATORS}}


@pytest.fixture(scope="module")
def packed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shared run in one file of either kind; the second by the command line."""
    folder = tmp_path_factory.mktemp("packed")
    result = xl("export", run, "--out", folder / "ort", "--ort")
    assert result.exit_code == 0, result.output
    assert "ort is ready: ring memory" in result.stdout
    assert result.stderr == ""
    export(run, folder / "single-file", storage="single-file")
    return {name: folder / name for name in FILES}


def seal(folder: Path, spec: Spec, *names: str) -> None:
    """Makes `spec.json` fit what the folder holds now, as a writer with a bug would."""
    files = {**spec.files, **{name: file_facts(folder / name) for name in names}}
    save_spec(folder, dataclasses.replace(spec, files=files))


@pytest.mark.parametrize("storage", FILES)
def test_one_file_computes_what_two_compute(
    storage: str, packed: dict[str, Path], artefacts: dict[str, Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    folder = packed[storage]
    spec = load_spec(folder)
    graphs = {GRAPH, WEIGHTS, FUSED, ORT_GRAPH, OPERATORS}
    assert graphs & {path.name for path in folder.iterdir()} == graphs & set(spec.files) == FILES[storage]
    assert (spec.storage, spec.identity) == (storage, identity(folder / "spec.json"))
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))  # it needs no file of another place
    report = check(moved)
    assert report.passed
    assert report.max_difference < 1e-5
    sessions = [open_session(each) for each in (moved, artefacts["ring"])]
    segments = np.split(tokens[:200].reshape(2, -1), [8, 9, 16, 24, 31], axis=1)
    memories = [session.start(2) for session in sessions]
    for segment in (each for each in segments if each.shape[1] <= 8):
        mine, theirs = (
            session.step(segment, memory)[0] for session, memory in zip(sessions, memories, strict=True)
        )
        assert np.abs(mine - theirs).max() < (1e-6 if storage == "single-file" else 1e-4)  # the same graph
    texts = [
        [piece.token for piece in generate(session, "The ", max_tokens=50, sampler=Sampler(temperature=0))]
        for session in sessions
    ]
    assert texts[0] == texts[1]
    save_memory(memories[0], tmp_path / "stream")
    expected, _ = sessions[0].step(segments[0], memories[0].copy())
    for session in sessions:  # in another storage, the stream continues
        continued, _ = session.step(segments[0], load_memory(tmp_path / "stream", session))
        assert np.abs(continued - expected).max() < 1e-4


def test_the_operators_of_an_ort_file_are_listed(packed: dict[str, Path]) -> None:
    lines = (packed["ort"] / OPERATORS).read_text().splitlines()
    operators = {name for line in lines for name in line.split(";")[2].split(",")}
    assert {"Attention", "TensorScatter", "MatMul"} <= operators
    assert {line.split(";")[0] for line in lines} <= {"ai.onnx", "com.microsoft"}


def test_the_fused_graph_may_be_the_only_one(
    run: Path,
    artefacts: dict[str, Path],
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    command = ("export", run, "--out", tmp_path / "small", "--fused-ort", "--precision", "int8")
    refused(xl(*command), "is not built on this machine; build it with `xl-export fused-kernel`")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fused_cpu.build()
    assert "small is ready" in xl(*command).stdout
    assert check(tmp_path / "small").passed

    folder = export(run, tmp_path / "artefact", storage="fused-ort")
    graphs = {GRAPH, WEIGHTS, FUSED, ORT_GRAPH, FUSED_ORT, OPERATORS}
    assert graphs & {path.name for path in folder.iterdir()} == {FUSED_ORT, OPERATORS}
    # A reduced build of ONNX Runtime needs none of its own operators for a small model.
    operators = (folder / OPERATORS).read_text().splitlines()
    assert operators == ["xl_export;1;ConstantProduct,ConstantRows,RingRelativeLayer"]
    session, standard = open_session(folder), OrtSession.open(artefacts["ring"], kernel="standard")
    assert session.kernel == "fused"
    memories = session.start(2), standard.start(2)
    for segment in np.split(tokens[:80].reshape(2, -1), 5, axis=1):
        mine, theirs = session.step(segment, memories[0])[0], standard.step(segment, memories[1])[0]
        assert np.abs(mine - theirs).max() < 1e-4
    with pytest.raises(UserError, match=r"has only fused\.ort, which needs the fused operator"):
        OrtSession.open(folder, kernel="standard")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"not built on this machine; .* or export without"):
        open_session(folder)
    assert xl("info", folder).exit_code == 0


def test_what_needs_another_file_is_refused(packed: dict[str, Path], tmp_path: Path) -> None:
    needs_onnx = r"has its graph in step\.ort, and .* needs step\.onnx; export the run again without --ort"
    out = ("--out", tmp_path / "out")
    refused(xl("polygraphy", packed["ort"], *out), "step.ort, and polygraphy needs step.onnx")
    refused(xl("build", packed["ort"], *out), "step.ort, and TensorRT needs step.onnx")
    with pytest.raises(UserError, match=needs_onnx):
        open_session(packed["ort"], device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_more_than_a_file_can_hold_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"2,400,000,000 bytes, and one file with both has at most 2,130,706,432"
    ):
        refuse_too_many(600_000_000, "single-file", "fp32")
    monkeypatch.setattr(packing, "MAX_FILE_BYTES", 10_000)
    for storage in FILES:
        with pytest.raises(UserError, match=f"leave out --{storage}, or give a --precision"):
            export(run, tmp_path / "out", storage=storage, precision="int8")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_never_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = packing.ir.external_data.load_to_model

    def spoiled(model: Any) -> Any:
        model = load(model)
        for value in model.graph.initializers.values():
            if value.const_value.numpy().shape == (20, 16):  # of a feed-forward network
                value.const_value = packing.ir.tensor(-value.const_value.numpy(), name=value.name)
        return model

    monkeypatch.setattr(packing.ir.external_data, "load_to_model", spoiled)
    with pytest.raises(ArtefactError, match="with --single-file the graph differs from itself"):
        export(run, tmp_path / "out", storage="single-file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [b"Loop", b"EPContext"])
def test_an_ort_file_with_foreign_content_is_refused(
    name: bytes, packed: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed["ort"], tmp_path / "artefact"))
    spec, content = load_spec(folder), (folder / ORT_GRAPH).read_bytes()
    (folder / ORT_GRAPH).write_bytes(content + len(name).to_bytes(4, "little") + name + b"\0")
    seal(folder, spec, ORT_GRAPH)
    with pytest.raises(ArtefactError, match=f"has an operator {name.decode()}, which no artefact has"):
        open_session(folder)
    for other in (content[: len(content) // 2], b"", (packed["single-file"] / GRAPH).read_bytes()):
        (folder / ORT_GRAPH).write_bytes(other)
        seal(folder, spec, ORT_GRAPH)
        with pytest.raises(ArtefactError, match=r"step\.ort could not be loaded by ONNX Runtime"):
            open_session(folder)


def test_a_spec_that_lists_files_of_another_storage_is_refused(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed["single-file"], tmp_path / "artefact"))
    spec = load_spec(folder)
    (folder / WEIGHTS).write_bytes(b"x")
    seal(folder, spec, WEIGHTS)
    with pytest.raises(ArtefactError, match=r"its weights are in step\.onnx, and it lists others"):
        load_spec(folder)
    seal(folder, dataclasses.replace(spec, storage="ort"))
    with pytest.raises(ArtefactError, match=r"does not list step\.ort"):
        load_spec(folder)
