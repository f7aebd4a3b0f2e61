"""Drives an engine without HTTP: for tests, and to measure what the engine costs beside the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.pieces import Cache
from xl_export.serve.core.settings import EngineFacts, EngineSettings
from xl_export.serve.core.task import Answer, Delivery, Drawing, Ended, Task


def answers_of(
    session: Session,
    tasks: Sequence[Task],
    settings: EngineSettings,
    *,
    cache: Cache | None = None,
    within: float = 300.0,
) -> tuple[list[list[Answer]], EngineFacts]:
    """All answers of each task, from an engine that gets them all at once, and its facts at the end.

    within: seconds after which the tasks that have not ended are stopped.
    """
    answers: dict[Task, list[Answer]] = {task: [] for task in tasks}
    left, all_ended = len(tasks), threading.Event()

    def deliver(delivery: Delivery) -> None:
        nonlocal left
        for task, new in delivery:
            answers[task] += new
            if isinstance(new[-1], Ended):
                left -= 1
            else:
                engine.taken(task, len(new))
        if not left:
            all_ended.set()

    engine = Engine(session, settings, cache=cache, deliver=deliver)
    engine.start()
    for task in tasks:
        engine.submit(task)
    all_ended.wait(within)
    engine.stop(within=within)
    return list(answers.values()), engine.facts


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The CPU time of an engine's thread: in the session (model_seconds), and in everything else."""

    tokens: int
    model_seconds: float
    other_seconds: float

    @property
    def other_microseconds_per_token(self) -> float:
        """What the engine takes for a token beside the model."""
        return 1e6 * self.other_seconds / self.tokens


def cost_of(
    session: Session, *, streams: int, tokens: int, drawing: Drawing | None = None, prompt: int = 16
) -> Cost:
    """What it costs to draw so many tokens in each of some streams, prompts and ends included.

    drawing: how; its `max_tokens`, `index` and `ends` are set here. prompt: tokens of each stream's prompt.
    """
    timed = _Timed(session)
    chance, like = np.random.default_rng(0), drawing or Drawing(max_tokens=tokens)
    tasks = [
        Task(
            tokens=chance.integers(session.vocab.size, size=prompt),
            drawing=Drawing(
                max_tokens=tokens,
                sampler=like.sampler,
                seed=like.seed,
                index=index,
                stop=like.stop,
                bias=like.bias,
                ends=False,
            ),
        )
        for index in range(streams)
    ]
    done, left, began, total = threading.Event(), streams, 0.0, 0.0

    def deliver(delivery: Delivery) -> None:
        nonlocal left, total
        for task, new in delivery:
            if isinstance(new[-1], Ended):
                left -= 1
            else:
                engine.taken(task, len(new))
        if not left:
            total = time.thread_time() - began
            done.set()

    engine = Engine(timed, EngineSettings(rows=max(streams, 2)), deliver=deliver)
    timed.seconds = 0.0
    for task in tasks:
        engine.submit(task)
    engine.start()
    done.wait()
    engine.stop(within=10)
    return Cost(tokens=streams * tokens, model_seconds=timed.seconds, other_seconds=total - timed.seconds)


class _Timed:
    """A session that adds up the CPU time of its steps."""

    def __init__(self, session: Session) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def before_run(self) -> Callable[[], object] | None:
        """What the engine does within a step. Its time is the engine's, and not the session's."""
        return self._session.before_run

    @before_run.setter
    def before_run(self, call: Callable[[], object] | None) -> None:
        def timed() -> None:
            assert call is not None
            began = time.thread_time()
            call()
            self.seconds -= time.thread_time() - began

        self._session.before_run = timed if call is not None else None

    def predict(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        began = time.thread_time()
        answer = self._session.predict(tokens, memory, lengths=lengths)
        self.seconds += time.thread_time() - began
        return answer
