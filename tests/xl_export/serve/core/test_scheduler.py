"""Any load gives each task what it gets alone, whatever happens to the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtimes import evaluate, generate
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import ByteVocab
from tests.xl_export.serve.core.driver import Driver, Faulty, any_task, said
from xl_export.serve.core.task import PromptFed, SamplingParams, Task, TokenOut

POISON = 3


@pytest.fixture(scope="module")
def pool(session: Session) -> list[tuple[Task, list[object]]]:
    """Tasks of all kinds, and what each says when it has the engine for itself."""
    chance, found = np.random.default_rng(5), []
    for seed in range(40):
        task = any_task(chance, session.vocab.size, seed)
        driver = Driver(session, rows=1)
        driver.run(task)
        found.append((task, said(driver.answers[task])))
    return found


def test_alone_a_task_says_what_generate_and_evaluate_say(
    session: Session, pool: list[tuple[Task, list[object]]]
) -> None:
    assert {(task.sampling is None, task.score, task.keep) for task, _ in pool} >= {
        (True, True, False), (False, True, True), (False, False, False), (False, False, True),
    }  # fmt: skip
    for task, _ in pool:
        driver = Driver(session, rows=2)
        driver.run(task)
        if task.score:
            log_probs = driver.log_probs(task)
            assert len(log_probs) == len(task.tokens)
            assert np.isnan(log_probs[0])
            if len(task.tokens) > 1:
                expected = -evaluate(session, task.tokens).token_nats
                assert np.abs(log_probs[1:] - expected).max() < 1e-4
        sampling = task.sampling
        if sampling is not None and not sampling.bias:
            pieces = list(
                generate(
                    session, task.tokens, max_tokens=sampling.max_tokens, sampler=sampling.sampler,
                    seed=sampling.seed, stop=sampling.stop,
                )
            )  # fmt: skip
            assert driver.tokens(task) == [piece.token for piece in pieces]
            assert driver.text(task) == "".join(piece.text for piece in pieces)
            assert driver.ended(task).reason == pieces[-1].ended


@pytest.mark.parametrize("rows", [3, 32])
def test_a_mixed_load_changes_no_bit_of_a_task(
    rows: int, session: Session, pool: list[tuple[Task, list[object]]]
) -> None:
    chance = np.random.default_rng(rows)
    driver = Driver(session, rows=rows, prompt_tokens=24)
    expected = {}
    for at in chance.permutation(2 * len(pool)):
        task, alone = pool[at % len(pool)]
        task = replace(task)
        expected[task] = alone
        driver.submit(task)
        driver.iterate(int(chance.integers(3)))
    driver.run()
    for task, alone in expected.items():
        assert said(driver.answers[task]) == alone


def test_random_cancellations_leave_no_trace_and_no_row_is_lost(
    session: Session, pool: list[tuple[Task, list[object]]]
) -> None:
    count, rows = 300, 6
    chance = np.random.default_rng(count)
    driver, cancelled = Driver(session, rows=rows, prompt_tokens=16), 0
    expected: dict[Task, list[object]] = {}
    while cancelled < count or driver.scheduler.runs:
        if cancelled < count and len(driver.scheduler.runs) < 3 * rows:
            task, alone = pool[chance.integers(len(pool))]
            task = replace(task)
            expected[task] = alone
            driver.submit(task)
        if chance.random() < 0.5 and (runs := list(driver.scheduler.runs)):
            driver.cancel(runs[chance.integers(len(runs))])
            cancelled += 1
        if chance.random() < 0.6:
            driver.iterate()
            for task in [task for task in driver.answers if task not in driver.scheduler.runs]:
                *told, end = answers = said(driver.answers.pop(task))
                alone: Any = expected.pop(task)
                if end[0] != "cancelled":
                    assert answers == alone
                    continue
                assert (end[-1] is not None) == task.keep
                if len(told) == 1 and told[0][1:] == (None, None):  # how much of the prompt was fed
                    assert told[0][0] <= alone[0][0]
                else:
                    assert told == alone[: len(told)]
    driver.iterate()
    scheduler = driver.scheduler
    assert (scheduler.rows.free, scheduler.queue.count, len(scheduler.runs)) == (rows, 0, 0)
    assert sum(scheduler.ended.values()) > count
    task, alone = pool[0]
    driver.run(last := replace(task))
    assert said(driver.answers[last]) == alone


def test_a_kept_stream_continues_bitwise(session: Session) -> None:
    """Fed in parts, drawn in parts, cancelled in the middle: the same numbers as in one go on the ring."""
    text = np.random.default_rng(2).integers(session.vocab.size, size=32)
    whole, parts = Driver(session, rows=2), Driver(session, rows=2)
    sampling = SamplingParams(max_tokens=20, sampler=Sampler(temperature=0))
    whole.run(task := Task(tokens=text, sampling=sampling, score=True, keep=True))
    parts.run(first := Task(tokens=text[:16], score=True, keep=True))
    parts.run(second := Task(tokens=text[16:], score=True, keep=True, state=parts.ended(first).state))
    log_probs = np.concatenate([parts.log_probs(first), parts.log_probs(second)])
    assert np.isnan(log_probs[0])
    assert np.array_equal(log_probs[1:], whole.log_probs(task)[1:])
    nothing = np.zeros(0, np.int64)
    third = Task(tokens=nothing, sampling=sampling, keep=True, state=parts.ended(second).state)
    parts.submit(third)
    parts.iterate(6)
    parts.cancel(third)
    parts.run()
    cut = parts.ended(third).state
    drawn = parts.tokens(third)
    assert cut.position == 32 + len(drawn)  # the last drawn token too: the client knows it
    assert cut.tail.tolist() == [*text, *drawn][-9:]
    rest = SamplingParams(max_tokens=20 - len(drawn), sampler=Sampler(temperature=0))
    parts.run(fourth := Task(tokens=nothing, sampling=rest, keep=True, state=cut))
    assert drawn + parts.tokens(fourth) == whole.tokens(task)
    one, other = whole.ended(task).state, parts.ended(fourth).state
    assert np.array_equal(one.logits, other.logits)
    assert (one.position, one.tail.tolist()) == (52, other.tail.tolist())
    assert one.tail.tolist() == [*text, *whole.tokens(task)][-9:]
    assert all(np.array_equal(array, other.memory.tensors[n]) for n, array in one.memory.tensors.items())


def test_half_a_character_waits_for_its_other_half(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [byte for byte in range(256) if byte not in "€".encode()]
    monkeypatch.setattr(session, "vocab", ByteVocab([*"€".encode(), *others][: session.vocab.size]))
    driver, state, texts = Driver(session, rows=1), None, []
    for token, keep in ((0, True), (1, True), (2, True), (0, False)):
        sampling = SamplingParams(max_tokens=1, sampler=Sampler(temperature=0), bias={token: 100.0})
        tokens = np.array([5] if state is None else [], np.int64)
        driver.run(task := Task(tokens=tokens, state=state, sampling=sampling, keep=keep))
        texts.append(driver.text(task))
        state = driver.ended(task).state
    assert texts == ["", "", "€", "\ufffd"]


@pytest.mark.parametrize(
    ("what", "prompt_tokens"),
    [("raises", 8), ("spoils", 64)],  # 64: several groups of prompts in an iteration
)
def test_a_failing_step_fails_only_its_tasks(
    what: str, prompt_tokens: int, session: Session, pool: list[tuple[Task, list[object]]]
) -> None:
    """A poisonous token stands in some prompts. Whoever was stepped with it may fail too, where the step
    itself fails; all others are right, and so are those that come into the same rows afterwards.
    """
    faulty = Faulty(session, **{what: POISON})
    driver = Driver(faulty, rows=4, prompt_tokens=prompt_tokens)  # type: ignore[arg-type]
    good = [(replace(t), alone) for t, alone in pool if POISON not in t.tokens and t.sampling is None]
    bad = [Task(tokens=np.array([1, 2, POISON] * n), score=n % 2 == 1, keep=True) for n in range(1, 6)]
    for number, (task, _) in enumerate(good):
        driver.submit(task, *bad[number : number + 1])
    driver.run()
    assert len(good) > 5
    for task, alone in good:
        assert said(driver.answers[task]) == alone
    for task in bad:
        ended = driver.ended(task)
        assert (ended.reason, ended.state) == ("failed", None)
        assert ("out of order" if what == "raises" else "logits are not finite") in ended.error
        assert "\n" not in ended.error
    assert driver.scheduler.rows.free == 4


@pytest.mark.parametrize("what", ["raises", "spoils"])
def test_a_failing_prompt_leaves_the_prompts_after_it_alone(what: str, session: Session) -> None:
    """It is stepped in a width of its own, and the last row takes its place in the middle of an iteration."""
    samplings = [SamplingParams(max_tokens=5, seed=seed, bias={POISON: -1e6}) for seed in range(3)]
    good = [Task(tokens=np.arange(5, 13), sampling=sampling) for sampling in samplings]
    alone = Driver(session, rows=3)
    alone.run(*(expected := [replace(task) for task in good]))
    driver = Driver(Faulty(session, **{what: POISON}), rows=6, prompt_tokens=64)  # type: ignore[arg-type]
    endless = Task(tokens=np.array([1, 2]), sampling=SamplingParams(max_tokens=10**6, bias={4: 1e6}))
    driver.submit(endless)
    driver.iterate(2)
    driver.submit(bad := Task(tokens=np.array([1, POISON])), *good)
    driver.iterate(20)
    assert driver.ended(bad).reason == "failed"
    assert [driver.tokens(task) for task in good] == [alone.tokens(task) for task in expected]
    assert list(driver.scheduler.runs) == [endless]


def test_a_row_that_fails_while_it_draws_fails_alone(
    session: Session, pool: list[tuple[Task, list[object]]]
) -> None:
    always = SamplingParams(max_tokens=9, bias={POISON: 1e6})  # it draws the poison and then feeds it
    tasks = [(replace(task), alone) for task, alone in pool[:8]]
    driver = Driver(Faulty(session, spoils=POISON), rows=9)  # type: ignore[arg-type]
    sound = [(task, alone) for task, alone in tasks if POISON not in task.tokens]
    driver.run(bad := Task(tokens=np.array([1, 2]), sampling=always), *[task for task, _ in sound])
    assert (driver.ended(bad).reason, driver.tokens(bad)) == ("failed", [POISON])
    right = [
        said(driver.answers[task]) == alone for task, alone in sound if POISON not in driver.tokens(task)
    ]
    assert len(right) > 3
    assert all(right)


def test_a_selective_output_layer_equals_the_whole_one(selective: Session) -> None:
    chance = np.random.default_rng(1)
    tokens = chance.integers(selective.vocab.size, size=29)
    sampling = SamplingParams(max_tokens=5, sampler=Sampler(temperature=0))
    tasks = [
        Task(tokens=tokens, score=True),
        Task(tokens=tokens, score=True, keep=True),
        Task(tokens=tokens, score=True, top=3, sampling=sampling),
    ]
    driver = Driver(selective, rows=4)
    driver.run(*tasks)
    expected = -evaluate(selective, tokens).token_nats
    for task in tasks:
        assert np.abs(driver.log_probs(task)[1:] - expected).max() < 1e-4
    assert driver.ended(tasks[1]).state.logits is not None
    assert driver.tokens(tasks[2]) == [
        piece.token for piece in generate(selective, tokens, max_tokens=5, sampler=sampling.sampler)
    ]
    for answer in driver.answers[tasks[2]]:
        if isinstance(answer, TokenOut):
            assert answer.likeliest.ids[0, 0] == answer.token
            assert answer.likeliest.log_probs[0, 0] == pytest.approx(answer.log_prob, abs=1e-5)
        elif isinstance(answer, PromptFed):
            assert answer.likeliest.ids.shape == (answer.count, 3)
