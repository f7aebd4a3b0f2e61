from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.first_hour import run
from benchmarks.first_hour.catalogue import Step
from benchmarks.first_hour.rates import COPY, HALVES
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import models

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
