from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.first_hour import run
from benchmarks.first_hour.catalogue import Step
from benchmarks.first_hour.rates import COPY, HALVES
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import engines, models, shapes
from benchmarks.first_hour.steps.building import build_options
from benchmarks.first_hour.steps.outside import rtx_cache, trtexec
from runtimes.contract.engine import Profile, load_engine
from runtimes.contract.reference import load_reference
from runtimes.contract.spec import load_spec
from tests import fake_gpu
from xl_export.tensorrt.trtexec import LINE, timing_commands, trtexec_command

ROOT = Path(__file__).parents[3]
MEASURED = {COPY: (1e12, 2e12), HALVES: (1e14,)}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
    """`toy(function, **changes)`: a step of `toy_steps`; the step `machine` of a report is one of these."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(function: str, **changes: object) -> Step:
        facts = {"name": function, "title": f"a step: {function}", "gpu": False, **changes}
        return Step(target=f"tests.benchmarks.first_hour.toy_steps:{function}", **facts)  # type: ignore[arg-type]

    return make


@pytest.fixture
def machine(toy: Callable[..., Step], monkeypatch: pytest.MonkeyPatch) -> Step:
    """The first step, which finds no GPU."""
    step = toy("without_gpu", name="machine")
    monkeypatch.setattr(run, "FIRST", step)
    return step


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that the steps share, exported before a stand-in takes the place of a library."""
    work = tmp_path_factory.mktemp("models")
    record = Record(path=work / "step.json", work=work, results=work, quick=True)
    kind = models.Kind(target="tensorrt", form="ring", precision="fp16")
    models.artefact_of(record, models.config_of("small", quick=True), kind)
    return work


@pytest.fixture
def record(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A step of tiny models, on a GPU whose rates were measured."""
    monkeypatch.setattr(measure, "REST", 0)
    before = Record(path=tmp_path / "limits.json", work=tmp_path, results=tmp_path)
    for name, values in MEASURED.items():
        before.series(name, values)
    return Record(path=tmp_path / "step.json", work=work, results=tmp_path, quick=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeCuda:
    """A stand-in for TensorRT and CUDA; a build gives an engine that ONNX Runtime runs."""

    def build(artefact: Path, out: Path, options: Any) -> Any:
        rows = (1, 1, options.batch[2])
        profiles = (
            Profile(name="segment", batch=rows, tokens=(1, 8, 8)),
            Profile(name="token", batch=rows, tokens=(1, 1, 1)),
        )
        fake_gpu.make_engine(artefact, out, profiles=profiles, flavour=options.flavour)
        (out / engines.LAYERS).write_text('{"Layers": ["a", "b"]}')
        spec = load_spec(artefact)
        lines = [trtexec_command(artefact, spec, options, {})]
        lines += timing_commands(spec, options, load_reference(artefact, spec), out)
        (out / LINE).write_text("\n".join(lines) + "\n")
        return load_engine(out)[0]

    fake_gpu.install(monkeypatch, package="tensorrt_rtx")
    cuda = fake_gpu.install(monkeypatch)
    for module in (engines, shapes, build_options, trtexec, rtx_cache):
        monkeypatch.setattr(module, "build", build)
    return cuda
