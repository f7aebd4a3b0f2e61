"""How many CPU threads a step of a served model takes, where the user does not say it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xl_export.serve.core import trial
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.trial import SHORT, has_short_steps
from xl_export.serve.http.base import models
from xl_export.serve.http.base.models import Source

CPUS = 5


def source(path: Path, threads: int | None = None) -> Source:
    return Source(name="m", path=path, settings=EngineSettings(rows=2), threads=threads)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The threads with which sessions are opened, on a machine of five CPUs."""
    given: list[int | None] = []
    open_session = models.open_session

    def noted(path: Path, *, threads: int | None, device: Any) -> Any:
        given.append(threads)
        return open_session(path, threads=1, device=device)

    monkeypatch.setattr(models, "open_session", noted)
    monkeypatch.setattr(models, "available_cpus", lambda: CPUS)
    return given


@pytest.mark.parametrize(
    ("short", "small", "cpus", "given", "expected"),
    [
        (True, 1 << 30, CPUS, None, [4]),
        (False, 1 << 30, CPUS, None, [4, 5]),
        (True, 1000, CPUS, None, [5]),  # a large artefact is opened once
        (True, 1 << 30, 1, None, [1]),
        (True, 1 << 30, CPUS, 3, [3]),
    ],
)
def test_short_steps_leave_one_cpu_to_the_event_loop(
    short: bool,
    small: int,
    cpus: int,
    given: int | None,
    expected: list[int],
    artefacts: dict[str, Path],
    asked: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "has_short_steps", lambda session: short)
    monkeypatch.setattr(models, "SMALL", small)
    monkeypatch.setattr(models, "available_cpus", lambda: cpus)
    assert source(artefacts["ring"], given).open_session()[1] == expected[-1]
    assert asked == expected


def test_a_run_leaves_the_threads_to_pytorch(run: Path, asked: list[int | None]) -> None:
    assert source(run).open_session()[1] is None
    assert asked == [None]


def test_the_check_before_a_reload_uses_the_server_s_threads(
    artefacts: dict[str, Path], asked: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int | None] = []

    def check(path: Path, *, threads: int | None, device: Any) -> Any:
        checked.append(threads)
        return SimpleNamespace(passed=True)

    monkeypatch.setattr(models, "check", check)
    for threads in (None, 3):
        source(artefacts["ring"], threads).check()
    assert checked == [4, 3]


@pytest.mark.parametrize(("seconds", "short"), [(SHORT / 2, True), (2 * SHORT, False)])
def test_the_fastest_step_over_a_full_memory_decides(
    seconds: float, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[Any, ...]] = []
    now = 0.0
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now))

    def predict(tokens: np.ndarray, memory: Any) -> None:
        nonlocal now
        now += seconds if len(steps) == 3 else 2 * SHORT  # another program makes all other steps slow
        steps.append((tokens.shape, memory.positions.tolist()))

    memory = SimpleNamespace(positions=np.zeros(1, np.int64))
    session: Any = SimpleNamespace(
        start=lambda rows: memory, predict=predict, rule=SimpleNamespace(mem_len=70)
    )
    assert has_short_steps(session) == short
    assert set(map(str, steps)) == {"((1, 1), [70])"}
