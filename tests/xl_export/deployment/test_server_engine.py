"""Engines for Triton Inference Server, built by TensorRT-RTX in the place of TensorRT. None is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import refused, xl
from tests.triton_server import read_config
from xl_export.artefact.export import export
from xl_export.deployment.model_repository import write_engine
from xl_export.tensorrt import build
from xl_export.tensorrt.network import Parsed
from xl_export.tensorrt.options import BuildOptions

TYPES = {"TYPE_INT64": "INT64", "TYPE_INT32": "INT32", "TYPE_FP32": "FLOAT", "TYPE_FP16": "HALF"}


@pytest.mark.slow  # TensorRT-RTX builds an engine
def test_the_network_has_the_tensors_of_the_configuration(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    artefact = export(run, tmp_path / "artefact", target="tensorrt", memory="shift")
    options = BuildOptions(flavour="rtx", compute_capabilities=("8.6",), batch=(1, 1, 4))
    name = tmp_path / "engine"

    networks: list[Parsed] = []
    serialize = build.serialize

    def watched(trt: object, log: object, parsed: Parsed, *rest: object, **more: object) -> memoryview:
        networks.append(parsed)
        return serialize(trt, log, parsed, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "serialize", watched)
    folder = write_engine(artefact, tmp_path / "models", options, name=name, force=False)
    assert folder == tmp_path / "models" / "engine"
    assert (folder / "1" / "model.plan").stat().st_size > 50_000
    config = read_config((folder / "config.pbtxt").read_text())
    assert (config["backend"], config["max_batch_size"]) == (["tensorrt"], [4])
    assert config["instance_group"] == [{"count": [1], "kind": ["KIND_GPU"], "profile": ["0", "1"]}]
    batching = config["sequence_batching"][0]
    states = batching["state"]
    promised = {t["name"][0]: (TYPES[t["data_type"][0]], (-1, *t["dims"])) for t in config["input"]}
    promised |= {
        state["input_name"][0]: (TYPES[state["data_type"][0]], (-1, *state["dims"])) for state in states
    }
    promised[batching["control_input"][0]["name"][0]] = ("INT32", (-1, 1))
    network = networks[0].network
    found = [network.get_input(at) for at in range(network.num_inputs)]
    assert {tensor.name: (tensor.dtype.name, tuple(tensor.shape)) for tensor in found} == promised
    made = {network.get_output(at).name for at in range(network.num_outputs)}
    assert made == {"logits", *(state["output_name"][0] for state in states)}


def test_an_existing_model_is_refused_before_building(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build", lambda *_, **__: pytest.fail("an engine was built"))
    there = tmp_path / "models" / "e" / "config.pbtxt"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    made = xl("build", artefacts["shift"], "--out", tmp_path / "e", "--triton", tmp_path / "models")
    refused(made, f"{there.parent} holds other things", "'config.pbtxt', and no spec.json")
    assert there.read_text() == "mine"
    assert not (tmp_path / "e").exists()


def test_an_unusable_engine_is_refused_before_building(artefacts: dict[str, Path], tmp_path: Path) -> None:
    flavour = ("--flavour", "rtx", "--compute-capability", "8.6")
    made = xl("build", artefacts["shift"], "--out", tmp_path / "e", *flavour, "--triton", tmp_path / "models")
    refused(made, "--triton is for --flavour tensorrt")
    assert not list(tmp_path.iterdir())
