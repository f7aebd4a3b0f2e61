"""An engine draws by the rule of `Draw`, and names the likeliest tokens as sorting does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from runtimes.base.logits import log_sum_exp
from runtimes.contract.sampling import Sampler
from tests.sampling import read_cases
from xl_export.serve.core.running import Running
from xl_export.serve.core.sampling import RowSampler, likeliest, log_probs_of
from xl_export.serve.core.task import SamplingParams, Task

SESSION: Any = SimpleNamespace(
    vocab=SimpleNamespace(decoder=lambda: SimpleNamespace(prime=lambda ids: None, add=str), kind="char"),
    rule=SimpleNamespace(segment=8),
)


def run(sampler: Sampler, prompt: list[int], *, bias: dict[int, float] | None = None) -> Running:
    sampling = SamplingParams(max_tokens=9, sampler=sampler, seed=3, index=1, bias=bias or {})
    return Running(Task(tokens=np.array(prompt, np.int64), sampling=sampling), SESSION)


def test_every_case_draws_its_token() -> None:
    for case in read_cases():
        running = run(Sampler(**case["settings"]), case["prompt"])
        running.uniform = lambda number=case["uniform"]: number
        size = len(case["logits"])
        RowSampler([running], size, None)
        for token in case["generated"] if running.penalties else ():
            running.penalties.add(token)
        logits = np.array([case["logits"]], np.float32)
        assert RowSampler([running], size, None).sample(logits) == [case["token"]], case


def test_penalties_last_while_other_rows_come_and_go() -> None:
    greedy = Sampler(temperature=0, presence_penalty=2)
    one, other = run(greedy, [0]), run(Sampler(), [0])
    logits = np.array([[3.0, 2.5, 2.0]], np.float32)
    assert RowSampler([one], 3, None).sample(logits) == [0]
    assert RowSampler([other, one], 3, None).sample(np.repeat(logits, 2, axis=0))[1] == 1
    assert RowSampler([one], 3, None).sample(logits) == [2]


def test_a_row_without_a_finite_maximum_draws_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    logits[1, 7], logits[3, 7] = np.nan, np.inf
    tokens = RowSampler([run(Sampler(top_k=5), [0], bias={3: 100.0}) for _ in range(4)], 50, None).sample(
        logits
    )
    assert tokens == [3, -1, 3, -1]


def test_the_likeliest_tokens_are_those_that_sorting_finds() -> None:
    chance = np.random.default_rng(3)
    for size, count in ((300, 5), (300, 1), (300, 200), (4, 20), (20_000, 20)):
        for digits in (1, 6):  # with many equals, and with few
            logits = np.round(4 * chance.normal(size=(6, size)), digits).astype(np.float32)
            found = likeliest(logits, count)
            order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
            log_probs = logits - log_sum_exp(logits)[:, None]
            assert np.array_equal(found.ids, order)
            assert np.array_equal(found.log_probs, np.take_along_axis(log_probs, order, axis=1))
            tokens = order[:, -1]
            assert np.array_equal(log_probs_of(logits, tokens), log_probs[range(6), tokens])
