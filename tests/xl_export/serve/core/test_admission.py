"""Admission: shares of bulk and of tenants, reservations, bytes of states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver
from xl_export.serve.core.admission import Admission, Busy, EngineSettings, TooManyError
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.task import Drawing, Task


def task(**others: Any) -> Task:
    return Task(tokens=np.arange(3), **others)


def admitted(admission: Admission, tenant: str = "", *, bulk: bool = False, most: int = 100) -> int:
    """How many tasks of one kind are admitted, one after the other."""
    for count in range(most):
        try:
            admission.reserve(1, tenant, bulk=bulk)
        except Busy:
            return count
    return most


def test_bulk_leaves_half_of_the_queue_to_people() -> None:
    admission = Admission(EngineSettings(rows=2, queue=8))
    bulk = admission.reserve(6, bulk=True)
    assert admitted(admission, bulk=True) == 0
    assert admitted(admission) == 4
    bulk.release()
    assert admitted(admission) == 6  # people may have all of it
    assert admitted(admission, bulk=True) == 0


def test_no_tenant_shuts_out_the_first_task_of_another() -> None:
    admission = Admission(EngineSettings(rows=2, queue=8))
    half = admission.reserve(3, "a")
    assert [admitted(admission, tenant) for tenant in "abcd"] == [3, 2, 1, 1]
    with pytest.raises(Busy):
        admission.refuse(1, "e")
    half.release()
    assert admitted(admission, "e") == 1
    with pytest.raises(Busy, match="the tenant has its share of the queue, 3 tasks"):
        admission.refuse(1, "a")
    admission = Admission(EngineSettings(rows=2, queue=8))
    assert [admitted(admission, tenant, bulk=True) for tenant in "ab"] == [2 + 2, 1]
    assert admitted(admission, "a") == 2  # its own bulk does not count against its people


def test_tasks_that_wait_for_their_clients_need_no_place() -> None:
    paused: list[Task] = []
    admission = Admission(EngineSettings(rows=2, queue=2), paused=lambda: paused)
    assert admitted(admission) == 4
    paused += [task() for _ in range(3)]
    admission.refuse(3)
    with pytest.raises(Busy):
        admission.refuse(4)


@pytest.mark.parametrize(("tenant", "bulk", "most"), [("", False, 5), ("", True, 3), ("a", False, 3)])
def test_more_than_there_ever_are_is_refused_for_good(tenant: str, bulk: bool, most: int) -> None:
    admission = Admission(EngineSettings(rows=2, queue=3))
    with pytest.raises(TooManyError, match=f"{most + 1} tasks.*at most {most}"):
        admission.reserve(most + 1, tenant, bulk=bulk)
    admission.reserve(most, tenant, bulk=bulk)


def test_reserved_places_are_there_whoever_comes_in_between(session: Session) -> None:
    engine = Engine(session, EngineSettings(rows=2, queue=2), deliver=lambda delivery: None)
    with engine.admission.reserve(3) as places:
        engine.submit(task())
        for refused in (lambda: engine.submit(task()), lambda: engine.admission.refuse(1)):
            with pytest.raises(Busy, match=r"^2 tasks wait already.*ask again in"):
                refused()
        engine.submit(task(), places)
    engine.admission.reserve(2).release()
    with pytest.raises(Busy):
        engine.admission.reserve(3)
    with engine.admission.reserve(2) as places:
        engine.submit(task(), places)
        engine.submit(task(), places)
        with pytest.raises(Busy):
            engine.submit(task(), places)  # none is left
    engine.start()
    engine.stop(within=60)
    assert not engine.admission._places
    with pytest.raises(UserError, match="accepts no more tasks"):
        engine.admission.reserve(1)


def test_the_bytes_of_states_are_bounded(session: Session) -> None:
    """Of the states with which tasks begin, and of those that a request is about to make."""
    driver = Driver(session, rows=1)
    driver.run(*(tasks := [task(keep=True), task(keep=True)]))
    one, other = (driver.ended(each).state for each in tasks)
    engine = Engine(session, EngineSettings(state_bytes=2 * one.num_bytes), deliver=lambda delivery: None)
    engine.submit(task(state=one))
    memory = engine.admission.reserve(0, states=1)
    with engine.admission.reserve(1) as places:
        for ask in (
            lambda: engine.submit(task(state=other)),
            lambda: engine.submit(task(state=other), places),
            lambda: engine.admission.reserve(0, states=1),
        ):
            with pytest.raises(Busy, match="fill the memory"):
                ask()
    engine.submit(task(state=other), memory)  # which is covered
    with pytest.raises(UserError, match=r"3 prompts with several choices .* send fewer prompts"):
        engine.admission.reserve(0, states=3)
    engine.start()
    engine.stop(within=60)
    memory.release()
    memory.release()
    admission = engine.admission
    assert (admission._bytes, admission._places) == (0, {})


def test_the_bytes_of_rows_that_were_given_up_are_bounded(session: Session) -> None:
    """One copy is kept whatever its size; the next slow client loses its place, and keeps its stream."""
    driver = Driver(session, rows=2, unread=4, state_bytes=1)
    slow = [
        Task(tokens=np.arange(3), keep=True, drawing=Drawing(max_tokens=50, seed=n), tenant="a")
        for n in range(4)
    ]
    driver.slow.update(slow)
    driver.submit(*slow)
    driver.iterate(30)
    scheduler = driver.scheduler
    assert (len(scheduler.paused), scheduler.paused_copies.total, scheduler.rows.free) == (1, 1, 2)
    ends = [driver.ended(each) for each in slow if each not in scheduler.runs]
    assert [end.reason for end in ends] == ["cancelled"] * 3
    assert all("reads no answers" in end.error for end in ends)
    assert [end.state.position for end in ends] == [3 + len(driver.tokens(each)) for each in slow[1:]]
    busy = Task(tokens=np.arange(3), drawing=Drawing(max_tokens=9), tenant="a")
    driver.submit(busy, Task(tokens=np.arange(4), drawing=Drawing(max_tokens=9), tenant="a"))
    driver.iterate()
    driver.submit(other := Task(tokens=np.arange(3), tenant="b"))
    driver.iterate(3)
    assert driver.ended(other).reason == "length"
    assert (scheduler.preempted, scheduler.paused_copies.total) == (
        1,
        1,
    )
    driver.cancel(slow[0])
    driver.run()
    assert (scheduler.paused_copies.total, scheduler.preempted_copies.total) == (0, 0)
    assert not scheduler.paused_copies._own, "no tenant is remembered for ever"


def test_no_row_is_preempted_without_room_for_a_copy(session: Session) -> None:
    driver = Driver(session, rows=3, state_bytes=1)
    driver.submit(*(Task(tokens=np.arange(n), drawing=Drawing(max_tokens=30), tenant="a") for n in (3, 4, 5)))
    driver.iterate(2)
    driver.submit(*(Task(tokens=np.arange(n), drawing=Drawing(max_tokens=9), tenant=f"b{n}") for n in (3, 4)))
    driver.iterate(2)
    assert (driver.scheduler.preempted, driver.scheduler.preempted_copies.total) == (1, 1)


def test_slow_clients_of_one_tenant_leave_room_for_others(session: Session) -> None:
    """Half of the memory for streams that wait for their clients is for others."""
    one_row = sum(array.nbytes for array in session.start(1).tensors.values())
    driver = Driver(session, rows=4, unread=4, state_bytes=4 * one_row)
    drawing = Drawing(max_tokens=50)
    slow = [Task(tokens=np.arange(3), drawing=drawing, tenant="anna", keep=True) for _ in range(4)]
    driver.slow.update(slow)
    driver.submit(*slow)
    driver.iterate(30)
    assert [task in driver.scheduler.runs for task in slow] == [True, True, False, False]
    late = Task(tokens=np.arange(3), drawing=drawing, tenant="bert")
    driver.slow.add(late)
    driver.submit(late)
    driver.iterate(30)
    assert len(driver.scheduler.paused) == 3
