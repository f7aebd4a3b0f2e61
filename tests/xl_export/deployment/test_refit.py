"""Weights of another artefact in an engine, over the stand-in for TensorRT: no real engine is refitted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from runtimes import check
from runtimes.base.errors import ConfigError
from runtimes.contract.engine import load_engine, save_engine
from runtimes.contract.spec import BUILD, GRAPH, load_spec
from tests import fake_gpu
from tests.commands import json_of, refused, xl
from tests.conftest import RULE
from xl_export.artefact.export import export
from xl_export.deployment import refit as refitting
from xl_export.deployment.refit import refuse_other_steps


class Engine(fake_gpu._Engine):
    """An engine of the stand-in whose plan can be written again."""

    def __init__(self, cuda: Any, trt: Any, log: Any, plan: bytes) -> None:
        super().__init__(cuda, trt, log, plan)
        self.document = json.loads(plan)

    def serialize(self) -> bytes:
        return json.dumps(self.document).encode()


class Refitter:
    """Takes every weight; `missing` names some that it pretends to lack."""

    missing: tuple[str, ...] = ()

    def __init__(self, engine: Engine, log: Any) -> None:
        self.engine, self.graph = engine, ""

    def refit_cuda_engine(self) -> bool:
        if self.graph and not self.missing:
            self.engine.document["graph"] = self.graph
        return not self.missing

    def get_missing_weights(self) -> list[str]:
        return list(self.missing)


class OnnxParserRefitter:
    num_errors = 0

    def __init__(self, refitter: Refitter, log: Any) -> None:
        self.refitter = refitter

    def refit_from_bytes(self, model: bytes, path: str) -> bool:
        assert onnx.load_from_string(model).graph.node
        self.refitter.graph = path
        return True


@pytest.fixture
def engine(artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine that was built with --refit, and a TensorRT that refits it."""
    names: dict[str, Any] = {"Refitter": Refitter, "OnnxParserRefitter": OnnxParserRefitter}
    cuda = fake_gpu.install(monkeypatch, **names)
    import sys

    trt = sys.modules["tensorrt"]
    runtime = SimpleNamespace(deserialize_cuda_engine=None, engine_host_code_allowed=False)
    vars(trt)["Runtime"] = lambda log: SimpleNamespace(
        **vars(runtime) | {"deserialize_cuda_engine": lambda plan: Engine(cuda, trt, log, plan)}
    )
    return fake_gpu.make_engine(artefacts["shift"], tmp_path / "engine", refit=True)


@pytest.fixture(scope="module")
def other(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact of the same architecture with other weights."""
    return export(make_run(seed=1), tmp_path_factory.mktemp("other") / "artefact", memory="shift")


def test_an_engine_gets_weights_and_contract_of_another_artefact(
    engine: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refitting, "driver_version", lambda: "580.65.06")
    before = save_engine(engine, dataclasses.replace(load_engine(engine)[0], driver_cuda="13.0"))
    made = xl("refit", engine, other, "--out", tmp_path / "new")
    assert made.exit_code == 0, made.output
    assert f"the plan of {engine} with the weights of {other}" in made.output
    facts, spec = load_engine(tmp_path / "new")  # every hash is verified
    assert spec == load_spec(other)
    assert facts.artefact == load_spec(other).identity != before.artefact
    assert (facts.version, facts.profiles, facts.layers) == (before.version, before.profiles, before.layers)
    assert (facts.driver_version, facts.driver_cuda) == ("580.65.06", "13.1")
    assert check(tmp_path / "new").passed  # with the references of the other artefact
    assert load_engine(engine)[0] == before
    refused(xl("refit", engine, other, "--out", tmp_path / "new"), "exists already")
    again = xl("refit", engine, other, "--out", tmp_path / "new", "--force", "--json")
    assert json_of(again)["engine"] == str(tmp_path / "new")


def test_answers_and_storage_are_not_part_of_a_step(artefacts: dict[str, Path], tmp_path: Path) -> None:
    new = dataclasses.replace(load_spec(artefacts["shift"]), precision="int8", answers="stored-weights")
    old = dataclasses.replace(new, answers="exported")
    refuse_other_steps(old, new, tmp_path, tmp_path)
    refuse_other_steps(old, dataclasses.replace(new, storage="single-file"), tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="has another step than"):
        refuse_other_steps(old, dataclasses.replace(new, precision="int4"), tmp_path, tmp_path)


def test_what_cannot_be_refitted_is_refused(
    engine: Path,
    other: Path,
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "new"
    wider = export(make_run(d_ff=24), tmp_path / "wider", memory="shift")
    refused(
        xl("refit", engine, wider, "--out", out), "another step", "model.d_ff is 24, and the engine's is 20"
    )
    refused(xl("refit", engine, artefacts["ring"], "--out", out), "form is ring, and the engine's is shift")
    fixed = fake_gpu.make_engine(artefacts["shift"], tmp_path / "fixed")
    refused(xl("refit", fixed, other, "--out", out), "was built without --refit", "--refit --force")
    ahead = fake_gpu.make_engine(artefacts["shift"], tmp_path / "ahead", flavour="rtx")
    refused(
        xl("refit", ahead, other, "--out", out), "cannot be refitted; build one from", "`xl-export build`"
    )
    monkeypatch.setattr(Refitter, "missing", ("blocks.0.out",))
    refused(xl("refit", engine, other, "--out", out), "did not take the weights", "missing: blocks.0.out")
    elsewhere = fake_gpu.make_engine(artefacts["shift"], tmp_path / "old", refit=True, version="11.3.0")
    refused(xl("refit", elsewhere, other, "--out", out), "was built by TensorRT 11.3.0")
    weights = engine / "step.plan"
    weights.write_bytes(weights.read_bytes() + b" ")
    refused(xl("refit", engine, other, "--out", out), "step.plan")
    assert not out.exists()
    assert (engine / BUILD).is_file()
    assert (other / GRAPH).is_file()
    assert load_spec(other).rule == RULE
