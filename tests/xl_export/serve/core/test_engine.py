"""The engine's thread: submit, cancel, stop and refuse from other threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver, answers_of, any_task, said
from xl_export.serve.core.engine import Engine, dependence_of_rows
from xl_export.serve.core.rows import rows_of
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Answer, Delivery, Ended, SamplingParams, Task, TokenOut


class Held:
    """A session whose steps wait until they are let go."""

    def __init__(self, session: Session) -> None:
        self._session, self.entered, self.let_go = session, threading.Event(), threading.Event()
        self.let_go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def predict(self, *given: Any, **lengths: Any) -> Any:
        self.entered.set()
        assert self.let_go.wait(60)
        return self._session.predict(*given, **lengths)


class Clients:
    """Gathers what an engine delivers."""

    def __init__(self) -> None:
        self.answers: dict[Task, list[Answer]] = {}
        self.changed = threading.Condition()

    def deliver(self, delivery: Delivery) -> None:
        with self.changed:
            for task, new in delivery:
                self.answers.setdefault(task, []).extend(new)
            self.changed.notify_all()

    def wait(self, *tasks: Task) -> None:
        """Until these tasks have ended, once each."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.ends(task) for task in tasks), 60)

    def ends(self, task: Task) -> list[Ended]:
        return [answer for answer in self.answers.get(task, []) if isinstance(answer, Ended)]


def endless(tokens: int = 3, **others: Any) -> Task:
    return Task(tokens=np.arange(tokens) + 1, sampling=SamplingParams(max_tokens=10**9), **others)


def test_tasks_from_many_threads_say_what_they_say_alone(session: Session) -> None:
    chance = np.random.default_rng(8)
    tasks = [any_task(chance, session.vocab.size, seed) for seed in range(30)]
    found, engine = answers_of(session, tasks, EngineSettings(rows=5))
    for task, answers in zip(tasks, found, strict=True):
        alone = Driver(session, rows=1)
        alone.run(task)
        assert said(answers) == said(alone.answers[task])
    scheduler = engine.scheduler
    assert (scheduler.rows.free, engine.waiting, sum(scheduler.ended.values())) == (5, 0, 30)
    assert scheduler.fed == sum(len(task.tokens) for task in tasks)
    assert engine.dependence is None


def test_cancelling_ends_a_task_after_the_present_step_whoever_cancels(session: Session) -> None:
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2), deliver=clients.deliver)
    engine.start()
    tasks = [endless(keep=n % 2 == 0) for n in range(5)]
    for task in tasks:
        engine.submit(task)
    threads = [threading.Thread(target=engine.cancel, args=(task,)) for task in [*tasks, *tasks]]
    for thread in threads:
        thread.start()
    clients.wait(*tasks)
    for thread in threads:
        thread.join()
    engine.cancel(tasks[0])  # has ended; and one that nobody has submitted
    engine.cancel(endless())
    engine.submit(last := Task(tokens=np.arange(3)))
    clients.wait(last)
    engine.stop(within=60)
    assert [[end.reason for end in clients.ends(task)] for task in tasks] == [["cancelled"]] * 5
    assert all((clients.ends(task)[0].state is not None) == task.keep for task in tasks)
    assert (engine.scheduler.rows.free, engine.waiting) == (2, 0)


def test_stopping_ends_every_task_once_with_its_state(session: Session) -> None:
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2, unread=10**9), deliver=clients.deliver)
    engine.start()
    tasks = [endless(keep=True) for _ in range(5)]  # in a row, and waiting
    for task in tasks:
        engine.submit(task)
    with clients.changed:
        assert clients.changed.wait_for(lambda: tasks[0] in clients.answers, 60)
    engine.stop(within=60)
    for task in tasks:
        (end,) = clients.ends(task)
        assert (end.reason, clients.answers[task][-1]) == ("stopped", end)
        drawn = [answer.token for answer in clients.answers[task] if isinstance(answer, TokenOut)]
        fed = 3 if drawn else 0
        assert end.state.position == fed + len(drawn)  # all that the client was told, and no more
        assert end.state.tail.tolist() == [1, 2, 3, *drawn][: fed + len(drawn)][-9:]
    with pytest.raises(UserError, match="accepts no more tasks"):
        engine.submit(endless())
    engine.stop(within=60)


def test_stopping_returns_in_time_although_a_step_hangs(session: Session) -> None:
    clients, held = Clients(), Held(session)
    engine = Engine(held, EngineSettings(rows=2), deliver=clients.deliver)  # type: ignore[arg-type]
    held.let_go.clear()
    held.entered.clear()
    engine.start()
    engine.submit(task := endless())
    assert held.entered.wait(60)
    engine.stop(within=0.01)
    assert not clients.ends(task)
    held.let_go.set()
    clients.wait(task)
    assert [end.reason for end in clients.ends(task)] == ["stopped"]


@pytest.mark.parametrize(("apart", "before_each_step"), [(0.0, [0, 1, 2, 3, 4]), (60.0, [0, 1, 1, 1, 1])])
def test_tokens_are_delivered_before_a_step_if_others_were_long_ago(
    apart: float, before_each_step: list[int], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xl_export.serve.core.engine.DELIVERY_GAP_SECONDS", apart)
    clients, known = Clients(), []
    engine = Engine(session, EngineSettings(rows=2), deliver=clients.deliver)
    engine.submit(task := Task(tokens=np.arange(3), sampling=SamplingParams(max_tokens=5, ends=False)))
    begins = session.begins

    def noted() -> None:
        begins()
        known.append(sum(isinstance(answer, TokenOut) for answer in clients.answers.get(task, [])))

    monkeypatch.setattr(session, "begins", noted)
    engine.start()
    clients.wait(task)
    engine.stop(within=60)
    assert known == before_each_step
    assert session.before_run is None  # the session does not keep an engine that has ended


def test_an_end_does_not_wait_for_the_tokens_of_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xl_export.serve.core.engine.DELIVERY_GAP_SECONDS", 1e9)
    clients = Clients()
    engine = Engine(session, EngineSettings(rows=2, unread=10**9), deliver=clients.deliver)
    engine.submit(other := endless())
    engine.submit(task := Task(tokens=np.arange(3), sampling=SamplingParams(max_tokens=5, ends=False)))
    engine.start()
    clients.wait(task)
    assert not clients.ends(other)
    engine.stop(within=60)


def test_a_delivery_that_fails_stops_nobody(session: Session) -> None:
    clients, failed = Clients(), []

    def deliver(delivery: Delivery) -> None:
        if not failed:
            failed.append(delivery)
            raise ZeroDivisionError("a slip")
        clients.deliver(delivery)

    engine = Engine(session, EngineSettings(rows=2), deliver=deliver)
    engine.start()
    engine.submit(Task(tokens=np.arange(3)))
    engine.submit(task := Task(tokens=np.arange(30)))
    clients.wait(task)
    engine.stop(within=60)
    assert len(failed) == 1


class MixedMemory:
    """A session in which the number of rows shows in the memory that a step leaves, not in its logits."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def predict(self, tokens: np.ndarray, *given: Any, **lengths: Any) -> Any:
        answer, memory = self._session.predict(tokens, *given, **lengths)
        for array in memory.tensors.values():
            array *= np.float32(1 + 1e-6 * len(tokens))
        return answer, memory


def test_rows_that_depend_on_each_other_are_noticed(session: Session) -> None:
    assert dependence_of_rows(session, EngineSettings(), rows_of(session, 32)) is None
    engine = Engine(MixedMemory(session), EngineSettings(), deliver=lambda delivery: None)  # type: ignore[arg-type]
    said = engine.dependence
    assert said.startswith(
        "rows are not independent of each other with ONNX Runtime, standard operators: 1 of"
    )
    assert "\n" not in said
