from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.first_hour import run
from benchmarks.first_hour.catalogue import Step

ROOT = Path(__file__).parents[3]


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
