"""Sweeps: values from text, combinations, and one model under several rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import evaluate, open_session
from runtimes.base.errors import ConfigError, StreamError
from runtimes.contract.rule import MemoryRule
from runtimes.tasks.sweep import parse_values, refuse_if_too_large, sweep
from trainer.run.session import TorchSession

RULE = MemoryRule(mem_len=16, segment=8)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("64", (64,)),
        ("64,128,0", (64, 128, 0)),
        ("5,5,3,5", (5, 3)),
        ("100:400:100", (100, 200, 300, 400)),
        ("100:399:100", (100, 200, 300)),
        ("1,10:20:10", (1, 10, 20)),
    ],
)
def test_values_from_text(text: str, values: tuple[int, ...]) -> None:
    assert parse_values(text, "--mem-len") == values


def test_a_sweep_has_every_combination_of_given_values() -> None:
    assert sweep(RULE) == [(RULE, 8)]
    pairs = sweep(RULE, mem_lens=(4, 32), segments=(2, 20), clamp_lens=(0, 6))
    assert [(rule.mem_len, segment, rule.clamp_len) for rule, segment in pairs] == [
        (4, 2, None),
        (4, 2, 6),
        (4, 20, None),
        (4, 20, 6),
        (32, 2, None),
        (32, 2, 6),
        (32, 20, None),
        (32, 20, 6),
    ]
    assert {(segment, rule.segment) for rule, segment in pairs} == {(2, 8), (20, 20)}
    with pytest.raises(ConfigError, match="1,024 settings"):
        sweep(RULE, mem_lens=range(32), segments=range(1, 33))
    with pytest.raises(ConfigError, match="mem_len is 99999999"):
        sweep(RULE, mem_lens=(99999999,))


def test_a_run_under_another_rule_equals_reopening_it(run: Path, tokens: np.ndarray) -> None:
    own = open_session(run)
    for rule, segment in sweep(own.rule, mem_lens=(0, 40), segments=(12,), clamp_lens=(0, 4)):
        varied = evaluate(own.with_rule(rule), tokens[:80], segment=segment)
        opened = evaluate(TorchSession.open(run, rule=rule), tokens[:80], segment=segment)
        assert np.array_equal(varied.token_nats, opened.token_nats)
        assert varied.rule == rule
    assert own.with_rule(own.rule) is own


def test_a_step_that_this_machine_cannot_hold_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(run)
    refuse_if_too_large(session, rows=2, segment=8)
    monkeypatch.setattr("runtimes.base.machine.memory_bytes", lambda: 1 << 20)
    refuse_if_too_large(session, rows=2, segment=8)
    with pytest.raises(StreamError, match=r"2 x 900 tokens with memory 16.*smaller --segment"):
        refuse_if_too_large(session, rows=2, segment=900)
