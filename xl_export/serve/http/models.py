"""A model that is served: its session, its engine, and the requests that use it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runtimes.contract.session import Session
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Answer, Task
from xl_export.serve.http.bridge import Accepts, Bridge, Delivery, Inbox, OnEnd, answers


class Serves(Accepts, Protocol):
    """What a server needs of an engine; see `xl_export.serve.core.engine.Engine`."""

    def start(self) -> None: ...
    def stop(self, *, within: float) -> None: ...
    @property
    def facts(self) -> Any: ...
    @property
    def alive(self) -> bool: ...


MakeEngine = Callable[[Session, EngineSettings, Callable[[Delivery], None]], Serves]
OpenSession = Callable[[Path], Session]


@dataclass(kw_only=True, eq=False)
class Model:
    """One artefact under one name. After a reload there is another object under the name; this one drains.

    users: requests and connections that use it. attached: what other parts of the server keep for it, by
    their name; whatever has a method `close` is closed after the engine has stopped.
    """

    name: str
    path: Path
    session: Session
    engine: Serves
    bridge: Bridge
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    attached: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each figure of the engine, for `/metrics`."""
        facts = self.engine.facts
        yield "num_requests_running", "Tasks that have a row.", facts.decoding + facts.prompts
        yield "num_requests_waiting", "Tasks that wait for a row.", facts.waiting
        yield "num_requests_paused", "Waiting tasks whose client takes nothing.", facts.paused
        yield "rows", "Rows, which is how many streams advance at once.", facts.rows
        yield "rows_decoding", "Rows that draw tokens.", facts.decoding
        yield "rows_prompt", "Rows that are fed tokens.", facts.prompts
        yield (
            "rows_usage_perc",
            "The share of the rows that is in use, from 0 to 1.",
            1 - facts.free / facts.rows,
        )
        yield "engine_steps_total", "Steps of the model.", facts.steps
        yield "engine_tokens_fed_total", "Tokens that were fed.", facts.tokens_fed
        yield "engine_tokens_padded_total", "Padding that was fed.", facts.tokens_padded
        yield "engine_tokens_drawn_total", "Tokens that were drawn.", facts.tokens_drawn
        yield "prefix_cache_hits_total", "Tokens that the prefix cache had.", facts.tokens_cached
        asked = facts.tokens_fed + facts.tokens_cached
        yield "prefix_cache_queries_total", "Tokens that could have been in the prefix cache.", asked
        yield "num_preemptions_total", "How often a task gave up its row.", facts.parked
        yield "engine_model_seconds_total", "Seconds in steps of the model.", facts.model_seconds
        yield "engine_other_seconds_total", "Seconds of the engine outside of steps.", facts.other_seconds

    def inbox(self) -> Inbox:
        """An inbox for tasks of this model; use it in a `with` block."""
        return Inbox(self.bridge, self.engine)

    def answers(self, task: Task, on_end: OnEnd | None = None) -> AsyncIterator[list[Answer]]:
        """See `xl_export.serve.http.bridge.answers`."""
        return answers(self.bridge, self.engine, task, on_end)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the block runs, a reload does not stop the engine of this model."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def drained(self, within: float) -> None:
        """Waits until no request uses this model, but no longer than that many seconds."""
        until = time.monotonic() + within
        while self.users and time.monotonic() < until:
            await asyncio.sleep(0.05)

    def stop(self, within: float) -> None:
        """Ends all tasks and the engine, and closes what is attached. It blocks; call it on a thread."""
        self.engine.stop(within=within)
        for part in self.attached.values():
            if close := getattr(part, "close", None):
                close()


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from, so that it can be opened again."""

    name: str
    path: Path
    open_session: OpenSession
    make_engine: MakeEngine
    settings: EngineSettings

    def open(self, loop: asyncio.AbstractEventLoop) -> Model:
        """The model with a running engine. It blocks; call it on a thread."""
        bridge = Bridge(loop, unread=self.settings.unread)
        session = self.open_session(self.path)
        engine = self.make_engine(session, self.settings, bridge.deliver)
        engine.start()
        return Model(name=self.name, path=self.path, session=session, engine=engine, bridge=bridge)
