"""The mask rule against its definition in words, written as loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ConfigError
from runtimes.base.records import from_json, to_json
from runtimes.contract.rule import MemoryRule


def sees(rule: MemoryRule, *, start: int, query: int, key: int) -> bool:
    """Whether the query sees the key, as the papers say it; all are stream positions, `start` the segment's
    first.
    """
    first_kept = start - rule.mem_len if rule.mask == "full" else query - rule.mem_len
    if query == key:
        return True
    if not first_kept <= key < query:
        return False
    return rule.initial_memory == "zeros" or key >= 0


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
@pytest.mark.parametrize("mask", ["same-length", "full"])
@pytest.mark.parametrize(("mem_len", "segment"), [(0, 1), (0, 4), (1, 1), (3, 5), (5, 3), (8, 8)])
def test_visible_is_the_definition(mask: Any, initial_memory: Any, mem_len: int, segment: int) -> None:
    rule = MemoryRule(mem_len=mem_len, segment=segment, mask=mask, initial_memory=initial_memory)
    for start in range(-7, 14):
        queries = np.arange(start, start + segment)[:, None]
        keys = np.arange(start - mem_len, start + segment)
        found = rule.visible(queries - keys, queries, queries - start)
        expected = [[sees(rule, start=start, query=q, key=k) for k in keys] for q in queries[:, 0].tolist()]
        assert found.tolist() == expected, start


@pytest.mark.parametrize("mask", ["same-length", "full"])
def test_padding_sees_only_itself_and_is_invisible(mask: Any) -> None:
    rule = MemoryRule(mem_len=4, segment=6, mask=mask)
    positions = np.arange(-3, 3)
    seen = rule.visible(positions[:, None] - positions, positions[:, None], np.arange(6)[:, None])
    assert seen[:3].tolist() == np.eye(6, dtype=bool)[:3].tolist()
    assert not seen[3:, :3].any()


@pytest.mark.parametrize("mask", ["same-length", "full"])
@pytest.mark.parametrize(("mem_len", "segment"), [(0, 1), (3, 5), (8, 8)])
def test_the_longest_distance_is_the_longest_that_is_seen(mask: Any, mem_len: int, segment: int) -> None:
    rule = MemoryRule(mem_len=mem_len, segment=segment, mask=mask)
    offsets = np.arange(segment)[:, None]
    distances = np.arange(3 * (mem_len + segment))
    seen = np.atleast_2d(rule.visible(distances, np.array(1000), offsets)).any(axis=0)
    assert distances[seen].max() == rule.longest_distance
    assert rule.position_rows == rule.longest_distance + 1
    assert rule.longest_distance < rule.slots  # so no slot of the ring is needed twice


@pytest.mark.parametrize(("clamp_len", "rows"), [(1, 2), (7, 8), (8, 9), (9, 9), (100, 9), (None, 9)])
def test_position_rows_end_at_the_clamp_or_the_longest_distance(clamp_len: int | None, rows: int) -> None:
    assert MemoryRule(mem_len=8, segment=4, clamp_len=clamp_len).position_rows == rows


def test_a_rule_survives_json_and_prints_every_field() -> None:
    rule = MemoryRule(mem_len=8, segment=4, mask="full", clamp_len=6, initial_memory="zeros")
    assert from_json(MemoryRule, to_json(rule), where="test") == rule
    assert str(rule) == "memory 8, segment 4, full mask, clamp 6, initial memory zeros"
    with pytest.raises(ConfigError, match="expected one of same-length, full"):
        from_json(MemoryRule, {**to_json(rule), "mask": "causal"}, where="test")
