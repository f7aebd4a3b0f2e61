"""An engine serves every kind of session, and says what the session says by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import generate, open_session
from runtimes.base.errors import StreamError
from runtimes.contract.memory import Memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.ort_gpu.session import OrtArray
from tests import fake_gpu, host_gpu
from tests.steps import observed
from tests.test_sessions import SIDES, opened, operator  # noqa: F401 (the fixture)
from tests.xl_export.serve.core.driver import Driver
from tests.xl_export.tracing.modules import RULE, VOCAB, Gru, T
from xl_export import trace
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.rows import JoinedRows, RowsInPlace, rows_of
from xl_export.serve.core.running import Running
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import PromptFed, SamplingParams, Task

ROWS = 3
IN_PLACE = {"ring", "cut-ring", "torch", "projected"}


def answers_alike(session: Session) -> None:
    """What a task says next to others is what `generate` says; an interrupted stream continues."""
    chance = np.random.default_rng(1)
    driver = Driver(session, rows=ROWS, prompt_tokens=2 * session.rule.segment)
    tasks = []
    for seed in range(8):
        tokens = chance.integers(session.vocab.size, size=int(chance.integers(1, 4 * session.rule.segment)))
        sampling = SamplingParams(max_tokens=int(chance.integers(1, 20)), sampler=Sampler(top_k=5), seed=seed)
        tasks.append(Task(tokens=tokens, sampling=sampling, keep=True, score=seed % 3 == 0, top=seed % 3))
        driver.submit(tasks[-1])
        driver.iterate(int(chance.integers(4)))
    driver.run()
    for task in tasks:
        sampling = task.sampling
        assert sampling is not None
        expected = generate(
            session, task.tokens, max_tokens=sampling.max_tokens, sampler=sampling.sampler, seed=sampling.seed
        )
        assert driver.tokens(task) == [piece.token for piece in expected]
    goes_on = replace(
        tasks[0], tokens=np.array([1]), state=driver.ended(tasks[0]).state, score=False, top=0, cached=False
    )
    driver.run(goes_on)
    tokens = np.concatenate([tasks[0].tokens, driver.tokens(tasks[0]), [1]])
    first = next(iter(generate(session, tokens, max_tokens=1, sampler=Sampler(top_k=5), seed=0)))
    assert driver.tokens(goes_on)[0] == first.token
    assert driver.ended(goes_on).state.position == len(tokens) + len(driver.tokens(goes_on))  # type: ignore[union-attr]


@pytest.mark.parametrize("side", SIDES)
def test_every_side_is_served(
    side: str,
    run: Path,
    operator: Path | None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu.install(monkeypatch)
    host_gpu.install(monkeypatch)
    session = opened(side, run, operator, tmp_path, monkeypatch)[-1]
    assert type(rows_of(session, ROWS)) is (RowsInPlace if side in IN_PLACE else JoinedRows)
    answers_alike(session)
    an_unread_stream_goes_on(session)


def an_unread_stream_goes_on(session: Session) -> None:
    """The token that was drawn last is fed to a copy of its row, which is on the host then."""
    driver = Driver(session, rows=ROWS, unread=2)
    sampling = SamplingParams(max_tokens=9, ends=False)
    driver.slow.add(task := Task(tokens=np.arange(2), sampling=sampling, keep=True))
    driver.run(task)
    ended = driver.ended(task)
    tokens = driver.tokens(task)
    assert (ended.reason, len(tokens) < 9) == ("cancelled", True)
    assert ended.state is not None
    assert ended.state.position == 2 + len(tokens)
    assert {type(array) for array in ended.state.memory.tensors.values()} == {np.ndarray}
    driver.run(goes_on := Task(state=ended.state, sampling=sampling))
    expected = generate(session, np.arange(2), max_tokens=len(tokens) + 1, sampler=Sampler(), seed=0)
    assert [piece.token for piece in expected][:-1] == tokens
    assert len(driver.tokens(goes_on)) > 0


def test_a_row_that_is_cut_at_the_end_of_its_ring_changes_no_other(cut_ring: Path) -> None:
    session = open_session(cut_ring, threads=1)
    size = session.spec.state[0].row[1]  # type: ignore[union-attr]
    chance = np.random.default_rng(0)
    begun = [chance.integers(session.vocab.size, size=size - cut) for cut in (0, 1, 3)]
    tokens = chance.integers(session.vocab.size, size=session.rule.segment)
    driver = Driver(session, rows=3)
    driver.run(*(firsts := [Task(tokens=each, keep=True) for each in begun]))
    tasks = [Task(tokens=tokens, state=driver.ended(first).state, keep=True) for first in firsts]
    driver.run(*tasks)
    alone = Driver(session, rows=1)
    alone.run(task := replace(tasks[0]))
    one, other = driver.ended(tasks[0]).state, alone.ended(task).state
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.logits, other.logits)  # type: ignore[arg-type]
    for name, array in one.memory.tensors.items():
        np.testing.assert_array_equal(array, other.memory.tensors[name])


@pytest.mark.parametrize("sizes", [{}, {"rows": 1, "tokens": (1, T)}], ids=["any", "one row"])
def test_a_traced_module_is_served(sizes: dict[str, Any], fast_traces: None, tmp_path: Path) -> None:
    session = open_session(trace(Gru(), tmp_path / "artefact", vocab=VOCAB, rule=RULE, **sizes), threads=1)
    assert type(rows_of(session, ROWS)) is JoinedRows
    answers_alike(session)


def test_a_module_of_several_rows_at_once_is_refused(fast_traces: None, tmp_path: Path) -> None:
    session = open_session(trace(Gru(), tmp_path / "artefact", vocab=VOCAB, rule=RULE, rows=2, tokens=(1, T)))
    with pytest.raises(StreamError, match="export it with rows=1"):
        Engine(session, EngineSettings(), deliver=lambda delivery: None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_named_inputs_advance_together(
    device: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of equal numbers of tokens share a step, and each has the bits that it has alone."""
    host_gpu.install(monkeypatch)
    alone = open_session(policy, threads=1, device=device)
    session = Counting(open_session(policy, threads=1, device=device))
    driver = Driver(session, rows=4)  # type: ignore[arg-type]
    memories = [alone.start(1) for _ in range(5)]
    states: list[StreamState | None] = [None] * 5
    for step in range(6):
        counts = [1 + step % 2 if number else 3 for number in range(5)]
        inputs = [observed(1, count, 10 * step + number) for number, count in enumerate(counts)]
        expected = [alone.step(*given)[0] for given in zip(inputs, memories, strict=True)]
        tasks = [
            Task(inputs=given, state=state, keep=True) for given, state in zip(inputs, states, strict=True)
        ]
        session.rows.clear()
        driver.run(*tasks)
        assert sorted(session.rows) == [1, 1, 3]  # four rows; the fifth stream waits for one
        states = [driver.ended(task).state for task in tasks]
        for task, wanted in zip(tasks, expected, strict=True):
            (fed, _) = driver.answers[task]
            assert isinstance(fed, PromptFed)
            assert fed.outputs is not None
            assert all(np.array_equal(fed.outputs[name], x) for name, x in wanted.items())
    assert [state.position for state in states if state] == [18, *[9] * 4]


def test_steps_whose_rows_depend_on_each_other_run_one_stream(policy: Path) -> None:
    class Mixed(Counting):
        def step(self, inputs: Any, memory: Any, **lengths: Any) -> Any:
            outputs, memory = super().step(inputs, memory, **lengths)
            return {name: x * np.float32(1 + 1e-6 * memory.batch) for name, x in outputs.items()}, memory

    session = Mixed(open_session(policy, threads=1))
    engine = Engine(session, EngineSettings(), deliver=lambda delivery: None)  # type: ignore[arg-type]
    assert engine.dependence is None
    session.rows.clear()
    for number in range(3):
        engine.scheduler.enter(Running(Task(inputs=observed(1, 1, number), keep=True), session))  # type: ignore[arg-type]
    engine.scheduler.iterate()
    assert session.rows == [1, 1, 1]


class Counting:
    """A session that notes the rows of its steps."""

    def __init__(self, session: Session) -> None:
        self._session, self.rows = session, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, inputs: Any, memory: Any, **lengths: Any) -> Any:
        self.rows.append(memory.batch)
        return self._session.step(inputs, memory, **lengths)


def test_no_memory_for_one_stream_ends_only_its_task(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(artefacts["shift"], threads=1)
    driver = Driver(session, rows=ROWS)
    sampling = SamplingParams(max_tokens=9)
    driver.submit(one := Task(tokens=np.arange(3), sampling=sampling))
    driver.iterate(3)
    with monkeypatch.context() as patch:
        patch.setattr(session, "start", fails)
        driver.submit(other := Task(tokens=np.arange(3), sampling=sampling))
        driver.iterate()
    driver.run()
    assert (driver.ended(one).reason, driver.ended(other).reason) == ("length", "failed")


def fails(*_: object) -> None:
    raise MemoryError("no room for a row")


@pytest.mark.parametrize("side", ["shift", "device"])
def test_streams_that_stay_together_are_not_copied(
    side: str, artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that joins is written next to the others; on a device without the host, once it has a memory
    of that many rows.
    """
    host_gpu.install(monkeypatch)
    device = "cuda" if side == "device" else "cpu"
    session = open_session(artefacts["shift"], threads=1, device=device)
    counts = {"written": 0, "downloaded": 0}

    def counting(kind: type, name: str, what: str) -> None:
        original = getattr(kind, name)

        def counted(self: Any, *given: Any) -> Any:
            counts[what] += 1
            return original(self, *given)

        monkeypatch.setattr(kind, name, counted)

    counting(Memory, "write_rows", "written")
    counting(OrtArray, "copy", "downloaded")
    counting(OrtArray, "rows", "downloaded")
    driver = Driver(session, rows=ROWS)

    def comes(count: int) -> None:
        driver.submit(Task(tokens=np.arange(1), sampling=SamplingParams(max_tokens=count)))

    for _ in range(2):  # then there are memories of one and of two rows
        comes(40)
        driver.iterate(3)
        comes(10)
        driver.iterate(3)
        before = dict(counts)
        driver.iterate(5)
        assert counts == before
        driver.run()
    assert counts["written"] > 4
    rows = driver.scheduler.rows
    comes(20)
    driver.iterate(3)
    before = dict(counts)
    comes(5)
    driver.iterate(3)
    assert counts["written"] > before["written"]
    assert counts["downloaded"] == before["downloaded"]
    driver.run()
    assert not rows.runs
