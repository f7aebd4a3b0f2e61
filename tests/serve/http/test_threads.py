"""How many CPUs a step of a served model takes, where the user does not say it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtimes.base.machine import available_cpus
from tests.serve.http.conftest import Running
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.trial import SHORT, has_short_steps
from xl_export.serve.http.base import models
from xl_export.serve.http.base.models import Opened, sources_of


def opened(path: Path, threads: int | None = None) -> Opened:
    """What the source of a folder opens."""
    (source,) = sources_of([("m", path)], EngineSettings(rows=2), threads=threads)
    return source.open_session(path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The threads with which sessions were opened."""
    given: list[int | None] = []
    open_session = models.open_session

    def noted(path: Path, *, threads: int | None, device: Any) -> Any:
        given.append(threads)
        return open_session(path, threads=threads, device=device)

    monkeypatch.setattr(models, "open_session", noted)
    return given


def test_short_steps_take_one_thread(
    artefacts: dict[str, Path], asked: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "has_short_steps", lambda session: True)
    assert opened(artefacts["ring"]).threads == 1
    assert asked == [1]


def test_long_steps_take_all_cpus(
    artefacts: dict[str, Path], asked: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "has_short_steps", lambda session: False)
    assert opened(artefacts["ring"]).threads == available_cpus()
    assert asked == [1, None]


def test_a_large_artefact_is_opened_once(
    artefacts: dict[str, Path], asked: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SMALL", 1000)
    assert opened(artefacts["ring"]).threads == available_cpus()
    assert asked == [None]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_are_given_are_taken(
    threads: int, artefacts: dict[str, Path], asked: list[int | None]
) -> None:
    assert opened(artefacts["ring"], threads).threads == threads
    assert asked == [threads]


def test_a_run_takes_what_pytorch_takes(run: Path, asked: list[int | None]) -> None:
    assert opened(run).threads == available_cpus()
    assert asked == [None]


@pytest.mark.parametrize(("seconds", "short"), [(0.0, True), (2 * SHORT, False)])
def test_the_time_of_a_step_decides(seconds: float, short: bool) -> None:
    steps: list[tuple[int, ...]] = []

    def predict(tokens: Any, memory: object) -> None:
        steps.append(tokens.shape)
        time.sleep(seconds)

    session: Any = SimpleNamespace(start=lambda rows: None, predict=predict)
    assert has_short_steps(session) == short
    assert set(steps) == {(1, 1)}


def test_a_model_tells_its_threads(served: Running) -> None:
    assert served.get("/v1/models").json()["data"][0]["xl_export"]["threads"] == 1
