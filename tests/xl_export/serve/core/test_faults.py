"""Whatever fails on the engine's thread, every task has one end, and the engine goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver
from tests.xl_export.serve.core.test_engine import Clients, endless
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.running import Running
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import SamplingParams, Task


def fails(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory for a copy")


def reasons(clients: Clients, *tasks: Task) -> list[str]:
    clients.wait(*tasks)
    assert all(len(clients.ends(task)) == 1 for task in tasks)
    return [clients.ends(task)[0].reason for task in tasks]


def test_a_fault_ends_every_task(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2), deliver=clients.deliver)
    feed, faults = engine.scheduler._feed, [MemoryError("out of memory")]

    def fails_once() -> None:  # when both rows have a task
        if faults:
            raise faults.pop()
        feed()

    monkeypatch.setattr(engine.scheduler, "_feed", fails_once)
    for task in (tasks := [endless(), endless(), endless()]):
        engine.submit(task)
    engine.start()
    assert reasons(clients, *tasks) == ["failed"] * 3
    assert "MemoryError" in clients.ends(tasks[0])[0].error
    engine.submit(last := Task(tokens=np.arange(3)))
    assert reasons(clients, last) == ["length"]
    engine.stop(within=60)


def test_a_stream_that_cannot_be_copied_fails_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients()
    settings = EngineSettings(rows=2, unread=10**9)
    engine = Engine(session, settings, deliver=clients.deliver)
    monkeypatch.setattr(engine.scheduler.rows, "taken_out", fails)
    engine.start()
    kept, other = endless(keep=True), Task(tokens=np.arange(3), sampling=SamplingParams(max_tokens=60))
    engine.submit(kept)
    with clients.changed:
        assert clients.changed.wait_for(lambda: kept in clients.answers, 60)
    engine.submit(other)
    engine.cancel(kept)
    assert reasons(clients, kept, other) == ["failed", "length"]
    tasks = [endless(keep=True), endless()]
    for task in tasks:
        engine.submit(task)
    with clients.changed:
        assert clients.changed.wait_for(lambda: all(task in clients.answers for task in tasks), 60)
    engine.stop(within=60)
    assert reasons(clients, *tasks) == ["failed", "stopped"]


def test_a_stream_whose_last_logits_are_not_finite_is_not_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(session, rows=2)
    driver.submit(task := Task(tokens=np.arange(3), sampling=SamplingParams(max_tokens=1), keep=True))
    driver.iterate()
    predict = session.predict
    monkeypatch.setattr(session, "predict", lambda *given: (predict(*given)[0] * np.nan, given[1]))
    driver.run()
    ended = driver.ended(task)
    assert (len(driver.tokens(task)), ended.reason, ended.state) == (1, "failed", None)
    assert "not finite" in ended.error


def test_a_command_that_fails_loses_no_task(session: Session) -> None:
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2), deliver=clients.deliver)
    scheduler, enter = engine.scheduler, engine.scheduler.enter
    tasks = [endless() for _ in range(4)]

    def slips(run: Running) -> None:
        if run.task is tasks[1]:
            fails()
        enter(run)

    scheduler.enter = slips  # type: ignore[method-assign]
    for task in tasks:
        engine.submit(task)
    engine.start()
    assert reasons(clients, *tasks) == ["failed"] * 4  # those before it and those behind it
    engine.submit(last := Task(tokens=np.arange(3)))
    assert reasons(clients, last) == ["length"]
    assert (engine.alive, engine.waiting) == (True, 0)
    engine.stop(within=60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_thread_fails_every_task(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2), deliver=clients.deliver)
    monkeypatch.setattr(engine.scheduler, "iterate", fails)
    monkeypatch.setattr(engine.scheduler, "fail_all", fails)
    for task in (tasks := [endless() for _ in range(3)]):
        engine.submit(task)
    engine.start()
    assert reasons(clients, *tasks) == ["failed"] * 3
    assert "engine has ended" in clients.ends(tasks[0])[0].error
    engine.stop(within=60)
    assert not engine.alive
