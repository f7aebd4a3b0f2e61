"""An engine in an event loop says what one with a thread of its own says, and ends as that does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver, any_task, said
from tests.xl_export.serve.core.test_engine import Clients, endless
from xl_export.serve.core import trial
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Delivery, Drawing, Drawn, Ended, Task

Deliver = Callable[[Delivery], None]


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            loop.close()


def never(delivery: Delivery) -> None:
    raise AssertionError("answers went another way")


def engine_in(loop: asyncio.AbstractEventLoop, session: Session, deliver: Deliver, **settings: int) -> Engine:
    engine = Engine(session, EngineSettings(**{"rows": 2, **settings}), deliver=never)  # type: ignore[arg-type]
    engine.start_in(loop, deliver)
    return engine


def test_tasks_say_in_a_loop_what_they_say_alone(session: Session) -> None:
    chance, clients = np.random.default_rng(8), Clients()
    tasks = [any_task(chance, session.vocab.size, seed) for seed in range(30)]
    with looping() as loop:
        engine = engine_in(loop, session, clients.deliver, rows=5)
        for task in tasks:
            engine.submit(task)
        clients.wait(*tasks)
        assert engine.facts.in_loop
        engine.stop(within=60)
        assert not engine.alive
    for task in tasks:
        alone = Driver(session, rows=1)
        alone.run(task)
        assert said(clients.answers[task]) == said(alone.answers[task])
    assert (engine.facts.free, engine.facts.waiting, sum(engine.facts.tasks_ended.values())) == (5, 0, 30)


def test_it_sleeps_without_work_and_wakes_for_a_task_of_any_thread(session: Session) -> None:
    clients = Clients()
    with looping() as loop:
        engine = Engine(session, EngineSettings(rows=2), deliver=never)
        engine.submit(early := Task(tokens=np.arange(3)))  # before there is a loop
        engine.start_in(loop, clients.deliver)
        clients.wait(early)
        for _ in range(5):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(60)
            iterations = engine._scheduler.iterations
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(60)
            assert engine._scheduler.iterations == iterations, "it turns without work"
            engine.submit(here := Task(tokens=np.arange(3)))
            there = Task(tokens=np.arange(4))
            loop.call_soon_threadsafe(engine.submit, there)
            clients.wait(here, there)
        engine.stop(within=60)


def test_other_things_that_the_loop_does_have_their_turn(session: Session) -> None:
    clients = Clients()
    with looping() as loop:
        engine = engine_in(loop, session, clients.deliver)
        engine.submit(task := endless())
        for _ in range(20):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
        engine.cancel(task)
        clients.wait(task)
        assert [end.reason for end in clients.ends(task)] == ["cancelled"]
        engine.stop(within=60)


def test_a_drawn_token_is_delivered_before_the_next_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, known, begins = Clients(), [], session.begins

    def noted() -> None:
        begins()
        known.append(sum(isinstance(answer, Drawn) for answer in clients.answers.get(task, [])))

    engine = Engine(session, EngineSettings(rows=2), deliver=never)
    monkeypatch.setattr(session, "begins", noted)
    engine.submit(task := Task(tokens=np.arange(3), drawing=Drawing(max_tokens=5, ends=False)))
    with looping() as loop:
        engine.start_in(loop, clients.deliver)
        clients.wait(task)
        engine.stop(within=60)
    assert known == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", ["another thread", "the loop", "after the loop"])
def test_stopping_ends_every_task_once_with_its_state(where: str, session: Session) -> None:
    clients = Clients()
    tasks = [endless(keep=True) for _ in range(4)]
    with looping() as loop:
        engine = engine_in(loop, session, clients.deliver)
        for task in tasks:
            engine.submit(task)
        with clients.changed:
            assert clients.changed.wait_for(lambda: clients.answers, 60)
        if where == "another thread":
            engine.stop(within=60)
        elif where == "the loop":
            loop.call_soon_threadsafe(lambda: engine.stop(within=60))
            clients.wait(*tasks)
    if where == "after the loop":
        assert loop.is_closed()
        assert engine.alive
        engine.stop(within=60)
    clients.wait(*tasks)
    engine.stop(within=60)
    assert not engine.alive
    for task in tasks:
        (end,) = clients.ends(task)
        assert (end.reason, clients.answers[task][-1]) == ("stopped", end)
        drawn = [answer.token for answer in clients.answers[task] if isinstance(answer, Drawn)]
        assert end.state is not None
        assert end.state.position == (3 if drawn else 0) + len(drawn)


@pytest.mark.parametrize("where", ["an iteration", "telling"])
def test_an_engine_that_dies_leaves_no_task_without_its_end(where: str, session: Session) -> None:
    clients, faults = Clients(), []
    with looping() as loop:
        loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
        engine = engine_in(loop, session, clients.deliver)

        def dies() -> Delivery:
            raise SystemError("out of order")

        if where == "an iteration":
            engine._scheduler.iterate = dies  # type: ignore[method-assign]
            engine._scheduler.fail_all = lambda error, runs: dies()  # type: ignore[method-assign,assignment,return-value]
        else:
            leaves = iter([dies])
            engine._door.leave = lambda *_: next(leaves, lambda: None)()  # type: ignore[method-assign,return-value,assignment]
            engine.submit(Task(tokens=np.arange(3)))
        engine.submit(task := endless())
        clients.wait(task)
        (end,) = clients.ends(task)
        assert end.reason == "failed"
        engine.stop(within=60)
        assert not engine.alive
    assert [type(fault) for fault in faults] == [SystemError]
    assert isinstance(end, Ended)


@pytest.mark.parametrize(
    ("seconds", "short"),
    [
        ([0.001, 0.005], True),
        ([0.006, 0.004, 0.001], True),
        ([0.006, 0.019, 0.006], False),
        ([0.03], False),
        ([0.001, 0.03], False),
    ],
)
def test_short_steps_are_told_from_a_busy_moment_and_long_ones_cost_one_try(
    seconds: list[float], short: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left, steps = 0.0, list(seconds), 0

    def clock() -> float:
        nonlocal now, steps
        steps += 1
        if steps % 2 == 0:  # the end of a step
            now += left.pop(0)
        return now

    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=clock))
    engine = Engine(session, EngineSettings(rows=4, loop_seconds=0.005), deliver=never)
    assert (engine.has_short_steps, left) == (short, [])


def test_no_step_is_tried_where_a_thread_is_wanted(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "time", None)
    assert not Engine(session, EngineSettings(rows=4, loop_seconds=0), deliver=never).has_short_steps
