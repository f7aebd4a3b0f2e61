"""What comes from an engine reaches its request once and in order, whether it is passed on or taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes.contract.session import Session
from tests.coroutines import in_thread
from tests.serve.http.conftest import SCOPE
from xl_export.serve.core.admission import EngineSettings, Places
from xl_export.serve.core.task import Ended, Task, TokenOut
from xl_export.serve.http.base.bridge import Bridge, Inbox, RequestMetrics
from xl_export.serve.http.base.encoding import TokenTexts
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.exchange import Exchange
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.openai.completions import Completion
from xl_export.serve.http.openai.plan import CompletionBody, plan_of


class Engine:
    """Takes every task and notes what it is told. told: answers that were taken."""

    def __init__(self) -> None:
        self.told = 0
        self.tasks: list[Task] = []
        self.places = Places(EngineSettings())

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def cancel(self, task: Task) -> None: ...

    def taken(self, task: Task, count: int) -> None:
        self.told += count


async def _answers(
    writable: list[bool], engine: Engine, metrics: RequestMetrics
) -> tuple[list[int], list[int]]:
    """Tokens that were passed on, and those that the request took, when two come in each turn of the loop."""
    bridge, task = Bridge(unread=8), Task(tokens=np.arange(1))
    passed: list[int] = []
    taken: list[int] = []

    def way(drawn: TokenOut) -> bool:
        if writable[drawn.token]:
            passed.append(drawn.token)
        return writable[drawn.token]

    async def request() -> None:
        with Inbox(bridge, engine, metrics) as inbox:  # type: ignore[arg-type]
            inbox.submit(task)
            inbox.pass_on(task, way)
            while inbox.running:
                for _, answers in await inbox.get():
                    taken.extend(answer.token for answer in answers if isinstance(answer, TokenOut))
                    passed.extend(-answer.token for answer in answers if isinstance(answer, TokenOut))

    working = asyncio.ensure_future(request())
    for token in range(len(writable)):
        if token % 2 == 0:
            await asyncio.sleep(0.01)
        bridge.deliver([(task, [TokenOut(token, "a")])])
    bridge.deliver([(task, [Ended(reason="length")])])
    await working
    assert not bridge.listeners
    return passed, taken


def test_tokens_keep_their_order_for_a_slow_client() -> None:
    engine, metrics = Engine(), RequestMetrics()
    writable = [True, True, False, True, True, True, True, False, True, True]
    order, taken = in_thread(_answers(writable, engine, metrics))
    assert [abs(token) for token in order] == list(range(10))
    assert taken == [2, 3, 7]  # the third came in the same turn as the second, and after it
    assert metrics.generated_tokens == 10
    assert engine.told == 10


def test_a_fault_in_delivery_is_raised_in_the_request() -> None:
    async def faulty() -> None:
        bridge, task = Bridge(), Task(tokens=np.arange(1))
        with Inbox(bridge, Engine(), RequestMetrics()) as inbox:  # type: ignore[arg-type]
            inbox.submit(task)
            inbox.pass_on(task, lambda drawn: bool(1 // 0))
            bridge.deliver([(task, [TokenOut(1, "a")])])
            await inbox.get()

    with pytest.raises(ZeroDivisionError):
        in_thread(faulty())


def test_a_slow_client_does_not_change_the_latency_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setitem(Bridge.deliver.__globals__, "time", clock)
    now, metrics, others = 10.0, RequestMetrics(), RequestMetrics()

    async def requests() -> None:
        nonlocal now
        bridge = Bridge()
        late, other = Task(tokens=np.arange(1)), Task(tokens=np.arange(1))
        with Inbox(bridge, Engine(), metrics) as inbox, Inbox(bridge, Engine(), others) as another:  # type: ignore[arg-type]
            inbox.submit(late)
            another.submit(other)
            for arrival in (11.0, 13.0, 15.0):  # nobody takes these for a long time
                now = arrival
                bridge.deliver([(late, [TokenOut(1, "a")])])
                await asyncio.sleep(0)
            now = 1000.0
            bridge.deliver([(other, [TokenOut(1, "a")])])
            await asyncio.sleep(0)
            await inbox.get()

    in_thread(requests())
    assert (metrics.to_first.sum, sum(metrics.to_first.counts)) == (1, 1)
    assert (metrics.between.sum, sum(metrics.between.counts)) == (4, 2)
    assert metrics.generated_tokens == 3


@pytest.mark.parametrize("begun", [True, False])
def test_a_failing_choice_loses_no_tokens_of_another(session: Session, begun: bool) -> None:
    """What arrives with the failure is sent before it, also text that was held back for a stop string. Where
    nothing was sent, the failure is the whole answer.
    """
    sent, engine = b"", Engine()

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    async def request() -> None:
        bridge = Bridge()
        model = SimpleNamespace(
            name="m",
            tasks=engine,
            texts=TokenTexts(session.vocab),
            inbox=lambda: Inbox(bridge, engine, RequestMetrics()),  # type: ignore[arg-type]
        )
        body = CompletionBody(prompt=["a", "b"], stream=True, stop=["xyz"])
        exchange = Exchange(None, SCOPE, None, send)  # type: ignore[arg-type]
        exchange.wire = SimpleNamespace(write=lambda data: False)  # type: ignore[assignment]
        plan = plan_of(body, session, Limits())
        completion: Any = Completion(plan, model, exchange)  # type: ignore[arg-type]
        working = asyncio.ensure_future(completion.run())
        await asyncio.sleep(0)
        failing, other = engine.tasks
        bridge.deliver([(failing, [TokenOut(1, "one")]), (other, [TokenOut(1, "two")])])
        if begun:
            await asyncio.sleep(0.01)
        failed = Ended(reason="failed", text="held", error="a step failed.")
        bridge.deliver([(failing, [failed]), (other, [TokenOut(2, "three")])])
        with pytest.raises(RefusedError, match="a step failed"):
            await working

    in_thread(request())
    texts = ("one", "two", "held", "three")
    assert [b'"text":"%s"' % text.encode() in sent for text in texts] == [begun] * 4
