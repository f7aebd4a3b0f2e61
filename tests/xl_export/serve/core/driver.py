"""Drives a scheduler on the test's own thread, iteration by iteration, and looks at its rows after each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.running import Running
from xl_export.serve.core.scheduler import Scheduler
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Answer, Delivery, Ended, PromptFed, SamplingParams, Task, TokenOut


class Driver:
    """A scheduler whose clients take every answer at once, but for those in `slow`.

    answers: of each task. at: the iteration in which each of its answers came.
    """

    def __init__(self, session: Session, *, cache: PrefixCache | None = None, **settings: int) -> None:
        self.session = session
        self.scheduler = Scheduler(session, EngineSettings(**settings), cache)
        self.answers: dict[Task, list[Answer]] = {}
        self.at: dict[Task, list[int]] = {}
        self.slow: set[Task] = set()

    def submit(self, *tasks: Task) -> None:
        for task in tasks:
            self.answers[task], self.at[task] = [], []
            self.scheduler.enter(Running(task, self.session))

    def cancel(self, task: Task) -> None:
        if run := self.scheduler.runs.get(task):
            self.scheduler.cancel(run, "cancelled")

    def iterate(self, times: int = 1) -> None:
        scheduler = self.scheduler
        for _ in range(times):
            for task, new in scheduler.iterate():
                assert new, "an empty list was delivered"
                self.answers[task] += new
                self.at[task] += [scheduler.iterations] * len(new)
                run = scheduler.runs.get(task)
                if run and task not in self.slow:
                    run.taken = run.sent
            self.check()

    def run(self, *tasks: Task, most: int = 5000) -> None:
        """Submits tasks and iterates until everything has ended."""
        self.submit(*tasks)
        while self.scheduler.has_work:
            self.iterate()
            assert (most := most - 1), "the tasks do not end"
        assert not self.scheduler.runs
        for answers in self.answers.values():
            assert [isinstance(answer, Ended) for answer in answers] == [False] * (len(answers) - 1) + [True]

    def check(self) -> None:
        """What holds after every iteration."""
        scheduler, rows = self.scheduler, self.scheduler.rows
        assert [run.row for run in rows.runs] == list(range(len(rows.runs)))
        assert 0 <= rows.decoding <= len(rows.runs) <= len(rows.runs) + rows.free
        assert len(scheduler.runs) == len(rows.runs) + scheduler.queue.count
        assert all(run.prompt_left == 0 for run in rows.runs[: rows.decoding])

    def ended(self, task: Task) -> Ended:
        last = self.answers[task][-1]
        assert isinstance(last, Ended)
        return last

    def tokens(self, task: Task) -> list[int]:
        return [answer.token for answer in self.answers[task] if isinstance(answer, TokenOut)]

    def text(self, task: Task) -> str:
        drawn = "".join(answer.text for answer in self.answers[task] if isinstance(answer, TokenOut))
        return drawn + (self.ended(task).text if isinstance(self.answers[task][-1], Ended) else "")

    def log_probs(self, task: Task) -> np.ndarray:
        """Of the fed tokens."""
        fed = [answer.log_probs for answer in self.answers[task] if isinstance(answer, PromptFed)]
        return np.concatenate([found for found in fed if found is not None])


def said(answers: list[Answer]) -> list[Any]:
    """Answers in a form that compares bit by bit, however the tokens were told in pieces."""
    found: list[Any] = []
    for answer in answers:
        likely = getattr(answer, "likeliest", None)
        bits = likely and (likely.ids.tolist(), likely.log_probs.tobytes())
        if isinstance(answer, PromptFed):
            log_probs = None if answer.log_probs is None else answer.log_probs.tobytes()
            found.append((answer.count, log_probs, bits))
        elif isinstance(answer, TokenOut):
            found.append((answer.token, answer.text, answer.log_prob, bits))
        else:
            found.append((answer.reason, answer.text, answer.error, state_bits(answer)))
    return found


def state_bits(ended: Ended) -> Any:
    """All bits of a kept state that anybody can see."""
    state = ended.state
    if state is None:
        return None
    logits = None if state.logits is None else state.logits.tobytes()
    return state.position, state.tail.tolist(), state.furthest, logits


def any_task(chance: np.random.Generator, size: int, seed: int) -> Task:
    """A task of any kind: a prompt to go on from, a text to score, a stream to keep."""
    draws = chance.random() < 0.7
    sampler = Sampler(
        temperature=float(chance.choice([0, 0.8, 1])), top_k=[None, 5][chance.integers(2)],
        top_p=float(chance.choice([0.8, 1])),
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=int(chance.integers(1, 30)),
        sampler=sampler,
        seed=seed,
        stop=("e t", "qu") if chance.random() < 0.3 else (),
        bias={int(chance.integers(size)): 3.0} if chance.random() < 0.3 else {},
    )
    score = not draws or chance.random() < 0.3
    return Task(
        tokens=chance.integers(size, size=int(chance.integers(1, 40))),
        sampling=sampling if draws else None,
        score=score,
        top=int(chance.integers(4)) if score else 0,
        keep=bool(chance.random() < 0.4),
        owner=str(chance.integers(3)),
    )


class Faulty:
    """A session whose steps fail, or say what is not a number, where a poisonous token is fed."""

    def __init__(self, session: Session, *, raises: int = -1, spoils: int = -1) -> None:
        self._session, self._raises, self._spoils = session, raises, spoils

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _answer(
        self, verb: str, tokens: np.ndarray, *others: Any, **lengths: Any
    ) -> tuple[np.ndarray, Memory]:
        if (tokens == self._raises).any():  # in the middle of a step, which has written something
            for array in others[-1].tensors.values():
                array[:] = np.nan
            raise RuntimeError("the model is out of order")
        answer, memory = getattr(self._session, verb)(tokens, *others, **lengths)
        for row in np.flatnonzero((tokens == self._spoils).any(axis=1)):
            answer[row] = np.nan
            for array in memory.tensors.values():
                array[row] = np.nan
            memory.unsure = True
        return answer, memory

    def predict(self, *given: Any, **lengths: Any) -> tuple[np.ndarray, Memory]:
        return self._answer("predict", *given, **lengths)

    def step(self, *given: Any, **lengths: Any) -> tuple[np.ndarray, Memory]:
        return self._answer("step", *given, **lengths)

    def score(self, *given: Any, **lengths: Any) -> tuple[np.ndarray, Memory]:
        return self._answer("score", *given, **lengths)


def answers_of(
    session: Session,
    tasks: Sequence[Task],
    settings: EngineSettings,
) -> tuple[list[list[Answer]], Engine]:
    """All answers of each task, from an engine that gets them all at once, and the engine after its end."""
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

    engine = Engine(session, settings, deliver=deliver)
    engine.start()
    for task in tasks:
        engine.submit(task)
    assert all_ended.wait(300)
    engine.stop(within=10)
    return list(answers.values()), engine
