"""Answers of an engine reach their request once and in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes.contract.session import Session
from tests.coroutines import in_thread
from xl_export.serve.core.admission import Places
from xl_export.serve.core.settings import EngineSettings, Limits
from xl_export.serve.core.task import Answer, Ended, PromptFed, SamplingParams, Task, TokenOut
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.mailbox import Mailboxes, RequestMetrics
from xl_export.serve.http.openai.completions import Completion
from xl_export.serve.http.openai.plan import CompletionBody, plan_of


class Engine:
    """Accepts every task and notes what it is told."""

    def __init__(self) -> None:
        self.taken_answers = 0
        self.cancelled: list[Task] = []
        self.tasks: list[Task] = []
        self.places = Places(EngineSettings())

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def cancel(self, task: Task) -> None:
        self.cancelled.append(task)

    def taken(self, task: Task, count: int) -> None:
        self.taken_answers += count


def task(*, draws: bool = True) -> Task:
    return Task(tokens=np.arange(1), sampling=SamplingParams(max_tokens=9) if draws else None)


def test_a_request_gets_all_answers_in_order_and_acknowledges_each() -> None:
    engine: Any = Engine()
    one, two = task(), task(draws=False)
    found: list[tuple[Task, Answer]] = []
    sent: list[tuple[Task, Answer]] = [
        (two, PromptFed(count=3, cached=1)),
        *((one, TokenOut(token, "a")) for token in range(6)),
        (two, Ended(reason="length")),
        (one, TokenOut(6, "a")),
        (one, Ended(reason="length")),
    ]

    async def request(mailboxes: Mailboxes, metrics: RequestMetrics) -> None:
        with mailboxes.open(engine, metrics) as mailbox:
            mailbox.submit(one)
            mailbox.submit(two)
            async for answered in mailbox:
                found.append(answered)

    async def run() -> RequestMetrics:
        mailboxes, metrics = Mailboxes(), RequestMetrics()
        working = asyncio.ensure_future(request(mailboxes, metrics))
        await asyncio.sleep(0)
        for number, (each, answer) in enumerate(sent):
            mailboxes.deliver([(task(), [TokenOut(99, "of a client that has left")]), (each, [answer])])
            if number % 3 == 0:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(working, 60)
        assert not mailboxes.tasks
        return metrics

    metrics = in_thread(run())
    assert found == sent
    assert engine.taken_answers == 8  # all but the two ends
    assert not engine.cancelled
    assert (metrics.generated_tokens, metrics.prompt_tokens, metrics.cached_tokens) == (7, 3, 1)
    assert metrics.ended == {"length": 1}, "of the task that draws"


@pytest.mark.parametrize("end", ["error", "cancelled"])
def test_a_request_that_ends_early_cancels_its_tasks(end: str) -> None:
    engine: Any = Engine()
    ended, running = task(), task()

    async def request(mailboxes: Mailboxes) -> None:
        with mailboxes.open(engine, RequestMetrics()) as mailbox:
            mailbox.submit(ended)
            mailbox.submit(running)
            async for each, _ in mailbox:
                if each is running:
                    raise ValueError

    async def run() -> None:
        mailboxes = Mailboxes()
        working = asyncio.ensure_future(request(mailboxes))
        await asyncio.sleep(0)
        mailboxes.deliver([(ended, [Ended(reason="length")])])
        await asyncio.sleep(0.01)
        if end == "error":
            mailboxes.deliver([(running, [TokenOut(1, "a")])])
        else:
            working.cancel()
        with pytest.raises(ValueError if end == "error" else asyncio.CancelledError):
            await working
        assert not mailboxes.tasks

    in_thread(run())
    assert engine.cancelled == [running]


def test_a_slow_client_does_not_change_the_latency_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setitem(Mailboxes.deliver.__globals__, "time", clock)
    now, metrics = 10.0, RequestMetrics()
    late = task()

    async def request() -> None:
        nonlocal now
        mailboxes = Mailboxes()
        with mailboxes.open(Engine(), metrics) as mailbox:  # type: ignore[arg-type]
            mailbox.submit(late)
            for arrival in (11.0, 13.0, 15.0):  # not taken for a long time
                now = arrival
                mailboxes.deliver([(late, [TokenOut(1, "a")])])
                await asyncio.sleep(0)
            now = 1000.0
            await mailbox.__anext__()

    in_thread(request())
    assert (metrics.to_first.sum, sum(metrics.to_first.counts)) == (1, 1)
    assert (metrics.between.sum, sum(metrics.between.counts)) == (4, 2)
    assert metrics.generated_tokens == 3


@pytest.mark.parametrize("begun", [True, False])
def test_a_failing_choice_loses_no_tokens_of_another(session: Session, begun: bool) -> None:
    """What arrives with the failure is sent before it, also text that was held back for a stop string."""
    engine: Any = Engine()
    sent = b""

    async def request(completion: Completion) -> None:
        nonlocal sent
        async for data in completion.events():
            sent += data

    async def run() -> None:
        mailboxes = Mailboxes()
        model: Any = SimpleNamespace(
            name="m",
            engine=engine,
            session=session,
            mailbox=lambda: mailboxes.open(engine, RequestMetrics()),
        )
        body = CompletionBody(prompt=["a", "b"], stream=True, stop=["xyz"])
        completion = Completion(plan_of(body, session, Limits()), model, id="1", owner="")
        working = asyncio.ensure_future(request(completion))
        await asyncio.sleep(0)
        failing, other = engine.tasks
        mailboxes.deliver([(failing, [TokenOut(1, "one")]), (other, [TokenOut(1, "two")])])
        if begun:
            await asyncio.sleep(0.01)
        failed = Ended(reason="failed", text="held", error="a step failed.")
        mailboxes.deliver([(failing, [failed]), (other, [TokenOut(2, "three")])])
        with pytest.raises(RefusedError, match="a step failed"):
            await working
        assert engine.cancelled == [other]

    in_thread(run())
    texts = ("one", "two", "held", "three")
    assert all(b'"text":"%s"' % text.encode() in sent for text in texts)
