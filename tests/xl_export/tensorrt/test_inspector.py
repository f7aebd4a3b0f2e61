"""What the inspector tells of a plan, as a file of the engine: the runtime alone is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtimes.contract.engine import PLAN, load_engine
from runtimes.sessions.tensorrt.module import fresh_log
from tests.fake_gpu import GPU
from xl_export.tensorrt import build as building
from xl_export.tensorrt.options import BuildOptions

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")


def test_layers_are_told_where_a_gpu_builds(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def told(form: Any) -> str:
        assert form == trt.LayerInformationFormat.JSON
        return json.dumps({"Layers": ["a"]})

    def deserialize(plan: bytes) -> Any:
        seen.append(plan)
        inspector = SimpleNamespace(get_engine_information=told)
        return SimpleNamespace(create_engine_inspector=lambda: inspector)

    runtime = SimpleNamespace(engine_host_code_allowed=False, deserialize_cuda_engine=deserialize)
    half_real = SimpleNamespace(**{name: getattr(trt, name) for name in dir(trt)})
    half_real.Runtime = lambda log: runtime
    log = fresh_log(trt)
    monkeypatch.setattr(building, "start_tensorrt", lambda spec, options: (half_real, log, GPU))
    monkeypatch.setattr(building, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(building, "Cuda", lambda: SimpleNamespace(driver_cuda="13.0"))
    options = BuildOptions(flavour="rtx", compute_capabilities=("8.9",), batch=(1, 1, 1))
    building.build(artefacts["shift"], tmp_path / "engine", options)
    facts, _ = load_engine(tmp_path / "engine")
    assert seen == [(tmp_path / "engine" / PLAN).read_bytes()]
    assert runtime.engine_host_code_allowed
    assert json.loads((tmp_path / "engine" / building.LAYERS).read_text()) == {"Layers": ["a"]}
    assert building.LAYERS in facts.files
    assert (facts.driver_version, facts.driver_cuda) == ("580.65.06", "13.0")
