"""The prefix cache keeps what serves others. That its states are exact is tested in test_sharing.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xl_export.serve.core import cache as cache_module
from xl_export.serve.core.cache import PrefixCache

T = 8


def cache_of(states: int, **options: Any) -> PrefixCache:
    """A cache with room for so many states."""
    return PrefixCache(**{"identity": "a", "segment": T, "max_bytes": states * 100} | options)


def feed(cache: PrefixCache, prompt: np.ndarray, owner: str = "") -> int:
    """Does with a prompt what an engine does, and returns how many of its tokens were found."""
    keys = cache.keys(prompt, owner)
    state: Any = cache.longest(keys)
    found = 0 if state is None else state.position
    for at in range(found // T * T + T, len(prompt) + T, T):
        if min(at, len(prompt)) > found and cache.wants(keys[: at // T]):
            cache.put(keys[at // T - 1], SimpleNamespace(num_bytes=100, position=min(at, len(prompt))))  # type: ignore
    return found


def found(cache: PrefixCache, prompt: np.ndarray, owner: str = "") -> int:
    """How many tokens of a prompt the cache has."""
    state = cache.longest(cache.keys(prompt, owner))
    return 0 if state is None else state.position


def test_whole_segments_are_found_and_the_end_of_a_prompt_by_itself(tokens: np.ndarray) -> None:
    cache = cache_of(100)
    feed(cache, tokens[:29])
    other = np.concatenate([tokens[:20], tokens[100:120]])
    for prompt, length in (
        (tokens[:29], 29),
        (tokens[:40], 24),  # the padded end serves nothing longer
        (tokens[:28], 24),
        (tokens[:24], 24),
        (other, 16),
        (tokens[1:29], 0),
        (tokens[:7], 0),
    ):
        assert found(cache, prompt) == length
    assert found(cache, tokens[:29], "ben") == 0, "keys do not find each other's prompts"
    cache = cache_of(100, shared=True)
    feed(cache, tokens[:16], "anna")
    assert found(cache, tokens[:16], "ben") == 16


def test_an_artefact_and_its_segment_are_part_of_the_key(tokens: np.ndarray) -> None:
    caches = [cache_of(1, identity=name, segment=segment) for name, segment in (("a", 8), ("b", 8), ("a", 4))]
    assert len({cache.keys(tokens[:4])[0] for cache in caches}) == 3


def test_bytes_are_bounded_and_the_oldest_goes_first() -> None:
    cache, prompts = cache_of(6), np.arange(60).reshape(6, 10)
    for prompt in prompts[:5]:
        feed(cache, prompt)
        assert cache.num_bytes == 100 * cache.states <= 600
    assert [found(cache, prompt) for prompt in prompts[2:5]] == [10, 10, 10]
    assert cache.evicted == 4
    found(cache, prompts[2])
    feed(cache, prompts[5])
    assert found(cache, prompts[2]) == 10, "what was used last stays"


def test_a_long_prompt_evicts_only_its_own_states(tokens: np.ndarray) -> None:
    cache, ends = cache_of(10), [tokens[at : at + 21] for at in (1000, 2000, 3000)]
    for prompt in ends:
        feed(cache, prompt)
    long = tokens[: 100 * T]
    feed(cache, long)
    assert [found(cache, prompt) for prompt in ends] == [21, 21, 21]
    assert found(cache, np.append(long, tokens[:5])) == len(long), "a longer prompt goes on from its end"


def test_the_place_at_which_prompts_part_is_kept(tokens: np.ndarray) -> None:
    """A system prompt of 10 pieces, after which every prompt has 20 of its own."""
    cache, common = cache_of(12), tokens[: 10 * T]
    prompts = [np.concatenate([common, tokens[at : at + 20 * T + 3]]) for at in (1000, 2000, 3000, 4000)]
    assert [feed(cache, prompt) for prompt in prompts][2:] == [10 * T, 10 * T]


def test_prefixes_are_forgotten_unless_they_are_used(
    tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_PREFIXES", 2)
    cache = cache_of(1000)
    for at in (0, 8, 16, 24):
        feed(cache, tokens[at : at + 8])
        assert found(cache, tokens[:8]) == 8
    assert found(cache, tokens[8:16]) == 0
    feed(cache, tokens[8:16])
    assert found(cache, tokens[8:16]) == 8
    assert cache.num_bytes == 100 * cache.states
