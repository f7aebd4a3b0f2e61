"""The prefix cache: what it finds is what feeding would give, and it keeps what serves others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtimes import Session
from tests.serve.streams.conftest import Advance, assert_same
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams import cache as cache_module
from xl_export.serve.streams.cache import PrefixCache

T = 8


def cache_of(states: int, of: StreamState, **options: bool) -> PrefixCache:
    """A cache with room for so many states."""
    return PrefixCache(identity="a", segment=T, max_bytes=states * of.num_bytes, **options)


@pytest.fixture
def state(fresh: StreamState, advance: Advance, tokens: np.ndarray) -> StreamState:
    """Any state: where only keys are tested, all have the same."""
    return advance(fresh, tokens[:1])


def feed(cache: PrefixCache, prompt: np.ndarray, state: StreamState, tenant: str = "") -> int:
    """Does with a prompt what an engine does, and returns how many of its tokens were found."""
    found, _ = cache.longest(prompt, tenant)
    for at in range(found // T * T + T, len(prompt) + T, T):
        if min(at, len(prompt)) > found and cache.wants(prompt[:at], state.num_bytes, tenant):
            cache.put(prompt[:at], state, tenant)
    return found


def test_a_cache_wants_what_it_has_not_and_can_keep(state: StreamState, tokens: np.ndarray) -> None:
    cache, size = cache_of(2, state), state.num_bytes
    assert not cache.wants(tokens[:T], 2 * size + 1)
    assert not cache.wants(tokens[:0], size)
    for length in (T, T + 3):
        assert cache.wants(tokens[:length], size)
        cache.put(tokens[:length], state)
        assert not cache.wants(tokens[:length], size)
        assert cache.wants(tokens[:length], size, "another")
    assert cache.facts.states == 2


def test_a_hit_is_bit_for_bit_what_feeding_gives(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    assert session.rule.segment == T
    cache, state = cache_of(100, advance(fresh, tokens[:1])), fresh
    for at in (8, 16, 24, 29):
        state = advance(state, tokens[at - 8 if at % 8 == 0 else 24 : at])
        cache.put(tokens[:at], state)
    for prompt, found in [
        (tokens[:29], 29),
        (tokens[:40], 24),  # the padded end serves nothing longer
        (tokens[:28], 24),
        (tokens[:24], 24),
        (np.concatenate([tokens[:20], tokens[100:120]]), 16),
        (tokens[1:29], 0),
        (tokens[:7], 0),
    ]:
        length, hit = cache.longest(prompt)
        assert length == found
        if hit is not None:
            assert_same(advance(hit, prompt[length:]), advance(fresh, prompt))


def test_tenants_do_not_find_each_others_prompts(state: StreamState, tokens: np.ndarray) -> None:
    cache = cache_of(100, state)
    cache.put(tokens[:16], state, "anna")
    assert cache.longest(tokens[:16], "anna")[0] == 16
    assert cache.longest(tokens[:16], "ben") == cache.longest(tokens[:16]) == (0, None)
    cache = cache_of(100, state, shared=True)
    cache.put(tokens[:16], state, "anna")
    assert cache.longest(tokens[:16], "ben")[0] == 16


def test_an_artefact_and_its_segment_are_part_of_the_key(state: StreamState, tokens: np.ndarray) -> None:
    keys = set()
    for identity, segment in (("a", 8), ("b", 8), ("a", 4)):
        cache = PrefixCache(identity=identity, segment=segment, max_bytes=1 << 30)
        keys.add(next(cache._keys(tokens[:4], cache._begin("")))[1])
    assert len(keys) == 3


def test_bytes_are_bounded_and_the_oldest_goes_first(state: StreamState) -> None:
    cache, prompts = cache_of(3, state), np.arange(60).reshape(6, 10)
    for prompt in prompts[:5]:
        cache.put(prompt, state)
        assert cache.facts.num_bytes <= 3 * state.num_bytes
    assert [cache.longest(prompt)[0] for prompt in prompts[:5]] == [0, 0, 10, 10, 10]
    facts = cache.facts
    assert (facts.states, facts.evicted, facts.hits, facts.misses, facts.tokens) == (3, 2, 3, 2, 30)
    cache.longest(prompts[2])
    cache.put(prompts[5], state)
    assert cache.longest(prompts[2])[0] == 10, "what was used last stays"
    cache.clear()
    assert cache.facts.num_bytes == cache.facts.states == 0


def test_a_state_larger_than_the_cache_is_not_kept(state: StreamState, tokens: np.ndarray) -> None:
    cache = PrefixCache(identity="a", segment=T, max_bytes=state.num_bytes - 1)
    cache.put(tokens[:8], state)
    assert cache.facts.states == 0


def test_a_long_prompt_evicts_only_its_own_states(state: StreamState, tokens: np.ndarray) -> None:
    cache, ends = cache_of(10, state), [tokens[at : at + 21] for at in (1000, 2000, 3000)]
    for prompt in ends:
        feed(cache, prompt, state)
    long = tokens[: 100 * T]
    feed(cache, long, state)
    assert [cache.longest(prompt)[0] for prompt in ends] == [21, 21, 21]
    assert cache.longest(long)[0] == len(long)
    assert cache.longest(np.append(long, tokens[:5]))[0] == len(long), "a longer prompt goes on from its end"


def test_the_place_at_which_prompts_part_is_kept(state: StreamState, tokens: np.ndarray) -> None:
    """A system prompt of 10 pieces, after which every prompt has 20 of its own."""
    cache, common = cache_of(12, state), tokens[: 10 * T]
    found = [
        feed(cache, np.concatenate([common, tokens[at : at + 20 * T + 3]]), state)
        for at in (1000, 2000, 3000, 4000)
    ]
    assert found[2:] == [10 * T, 10 * T]


def test_each_of_many_prompts_is_hashed_once(state: StreamState, tokens: np.ndarray) -> None:
    """More prompts are fed at once than an engine has rows, a piece of each in turn."""
    cache, hashed = cache_of(1000, state), [0]
    keys = cache._keys

    def counted(given: np.ndarray, chain: Any, *, begin: int = 0) -> Any:
        hashed[0] += len(given) - begin
        return keys(given, chain, begin=begin)

    cache._keys = counted  # type: ignore[method-assign]
    prompts = [np.roll(tokens[:80], at) for at in range(40)]
    for length in range(T, 81, T):
        for prompt in prompts:
            cache.put(prompt[:length], state)
    assert hashed[0] == 40 * 80
    assert cache.longest(prompts[7])[0] == 80


def test_an_array_at_a_reused_address_is_another_prompt(state: StreamState, tokens: np.ndarray) -> None:
    cache = cache_of(1000, state)
    for at in range(20):  # each array may get the place of the one before
        prompt = np.roll(tokens[:16], at)
        cache.put(prompt[:8], state)
        cache.put(prompt, state)
        del prompt
    for at in range(20):
        assert cache.longest(np.roll(tokens[:16], at))[0] == 16


def test_a_prefix_that_was_forgotten_is_put_again(
    state: StreamState, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "KNOWN", 2)
    cache, prompt = cache_of(1000, state), tokens[:8].copy()
    cache.put(prompt, state)
    for at in (8, 16, 24):
        cache.put(tokens[at : at + 8].copy(), state)
    assert cache.longest(prompt)[0] == 0
    cache.put(prompt, state)
    assert cache.longest(prompt)[0] == 8
    assert cache.facts.num_bytes == cache.facts.states * state.num_bytes
