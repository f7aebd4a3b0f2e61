"""Who gets a row and when, in iterations: keys in turn, slow clients, the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.task import PromptFed, SamplingParams, Task


def drawing_task(owner: str, count: int = 12, *, prompt: int = 3) -> Task:
    sampling = SamplingParams(max_tokens=count, seed=prompt)
    return Task(tokens=np.arange(prompt) + 1, sampling=sampling, owner=owner)


def test_keys_take_turns_however_much_each_has_sent(session: Session) -> None:
    driver = Driver(session, rows=1)
    driver.submit(*(many := [drawing_task("many", 4) for _ in range(5)]))
    driver.iterate()
    driver.submit(
        one := drawing_task("one", 4), other := drawing_task("other", 4), again := drawing_task("one", 4)
    )
    driver.run()
    ended = sorted((*many, one, other, again), key=lambda task: driver.at[task][-1])
    assert ended == [many[0], many[1], one, other, many[2], again, *many[3:]]


def test_a_long_prompt_is_fed_one_piece_an_iteration(session: Session) -> None:
    driver = Driver(session, rows=3, prompt_tokens=8)
    driver.submit(draws := drawing_task("a", 40))
    driver.iterate(2)
    driver.submit(long := replace(drawing_task("a", 1, prompt=60), score=True))  # each piece is told of
    driver.iterate(3)
    driver.submit(short := drawing_task("a", 1, prompt=4))
    driver.iterate(30)
    assert np.diff(driver.at[draws]).max() == 1  # a token in each iteration, whatever is fed
    fed = [
        at
        for at, answer in zip(driver.at[long], driver.answers[long], strict=True)
        if isinstance(answer, PromptFed)
    ]
    assert len(fed) == len(set(fed)) == 8
    assert driver.at[short][0] not in fed
    assert driver.at[short][0] <= 7  # it does not wait until the long one is fed


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_prompt_is_reported_once(session: Session, cancelled: bool) -> None:
    """Each delivery wakes the event loop, and nobody waits for the count of one piece."""
    driver = Driver(session, rows=2, prompt_tokens=8)
    driver.submit(long := drawing_task("a", 1, prompt=60))
    driver.iterate(3)
    assert not driver.answers[long]
    if cancelled:
        driver.cancel(long)
    driver.run()
    told = driver.answers[long][0]
    assert isinstance(told, PromptFed)
    assert told.count == (24 if cancelled else 60)
    assert not any(isinstance(answer, PromptFed) for answer in driver.answers[long][1:])


@pytest.mark.parametrize("keep", [False, True])
def test_a_client_that_reads_nothing_loses_its_answer_and_no_other_does(session: Session, keep: bool) -> None:
    driver = Driver(session, rows=2, unread=10)
    slow, other = replace(drawing_task("a", 50, prompt=5), keep=keep), drawing_task("a", 30, prompt=4)
    driver.slow.add(slow)
    driver.run(slow, other)
    ended = driver.ended(slow)
    assert (ended.reason, "has not read 10 answers" in ended.error) == ("cancelled", True)
    assert len(driver.answers[slow]) == 12  # the fed prompt and ten tokens, and the end
    if keep:  # the stream continues after all that was sent
        assert ended.state.position == 5 + len(driver.tokens(slow))
    assert driver.ended(other).reason == "length"


def test_a_prefix_from_the_cache_changes_no_bit(session: Session) -> None:
    """Whole segments are taken from any prompt, the padded rest of one only for the whole same prompt."""
    text = np.random.default_rng(0).integers(session.vocab.size, size=40)
    cache = PrefixCache(identity="a", segment=8, max_bytes=1 << 30)
    driver, cold = Driver(session, rows=2, cache=cache), Driver(session, rows=2)
    for count, expected in ((21, 0), (21, 21), (23, 16), (19, 16), (16, 16), (40, 16), (7, 0)):
        task = Task(tokens=text[:count], sampling=SamplingParams(max_tokens=8), keep=True)
        driver.run(task)
        found = [answer.cached for answer in driver.answers[task] if isinstance(answer, PromptFed)]
        assert (sum(found), count) == (expected, count)
        assert sum(answer.count for answer in driver.answers[task] if isinstance(answer, PromptFed)) == count
        cold.run(same := Task(tokens=text[:count], sampling=SamplingParams(max_tokens=8), keep=True))
        assert driver.tokens(task) == cold.tokens(same)
        one, other = driver.ended(task).state, cold.ended(same).state
        assert np.array_equal(one.logits, other.logits)
        assert (one.tail.tolist(), one.furthest) == (other.tail.tolist(), other.furthest)
    assert cache.states == 9  # after 7, 8, 16, 19, 21, 23, 24, 32 and 40 tokens
    others = [
        Task(tokens=text[:21], sampling=SamplingParams(max_tokens=2), cached=False),
        Task(tokens=text[:21], score=True),
        Task(tokens=text[:21], sampling=SamplingParams(max_tokens=2), owner="another"),
    ]
    driver.run(*others)
    assert cache.states == 9 + 3  # the other key's
    for task in others:
        assert not any(answer.cached for answer in driver.answers[task] if isinstance(answer, PromptFed))


def test_a_cache_without_room_for_a_state_is_not_used(session: Session) -> None:
    driver = Driver(session, rows=1, cache=PrefixCache(identity="a", segment=8, max_bytes=100))
    assert driver.scheduler.cache is None


def test_the_time_in_the_queue_is_counted_once_a_task(session: Session) -> None:
    driver = Driver(session, rows=2)
    driver.submit(one := drawing_task("one"), drawing_task("one"))
    driver.scheduler.runs[one].arrived -= 7
    driver.run()
    queued = driver.scheduler.queued
    assert queued.sum >= 7
    buckets = dict(queued.buckets())
    assert (buckets["5.0"], buckets["+Inf"]) == (1, 2)
