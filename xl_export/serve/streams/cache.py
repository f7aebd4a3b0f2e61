"""The prefix cache: states of streams after the beginnings of prompts, so that they are fed once.

A state is kept under the hash of everything that it depends on: the artefact, the tenant, and all tokens
before. A prompt is cut from its own beginning into pieces of a segment. So at a multiple of the segment every
prompt that begins with the same tokens has been fed in the same pieces, and a state from the cache is bit for
bit what feeding would give. The end of a prompt that is no multiple was fed as a padded piece. Its state
only serves the same whole prompt.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtimes.base.errors import ConfigError
from xl_export.serve.core.state import StreamState

KNOWN = 1 << 16  # prefixes whose hash is remembered after their state was dropped
WALKS = 1 << 12  # prompts that are being fed, of which the hash so far is remembered


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What a cache holds and has done."""

    states: int
    num_bytes: int
    hits: int
    misses: int
    #: How many were found in it and need not be fed.
    tokens: int
    evicted: int


@dataclass
class _Prefix:
    """A prefix that was seen."""

    state: StreamState | None = field(default=None, repr=False)
    #: The different pieces that have followed it, two of them at most: with two it is a place at which
    #: prompts part.
    followers: set[bytes] = field(default_factory=set)
    hit: bool = False

    @property
    def is_passed(self) -> bool:
        """Whether only one prompt went through it, on its way to a longer prefix."""
        return not self.hit and len(self.followers) == 1


@dataclass
class _Walk:
    """How far the prefixes of one prompt were noted."""

    #: The array that holds its tokens; once it is gone, another one may lie at its address.
    array: weakref.ref[np.ndarray] = field(repr=False)
    chain: hashlib._Hash = field(repr=False)
    length: int = 0
    key: bytes | None = None


class PrefixCache:
    """States after prefixes of prompts, bounded in bytes. One thread writes; any may read the facts.

    What was not used for the longest time is dropped first, in two classes: first the states in the middle of
    one prompt, which serve only a prompt that parts from it just there, and then the others: ends of prompts,
    places at which prompts part, and what was found before. So one long prompt replaces its own states and
    not everyone else's.
    """

    def __init__(self, *, identity: str, segment: int, max_bytes: int, shared: bool = False) -> None:
        """identity: of the session. shared: whether tenants may find each other's prefixes. Then the time to
        the first token reveals to a tenant whether another one has sent the same prompt.
        """
        if max_bytes < 1 or segment < 1:
            raise ConfigError(f"max_bytes is {max_bytes} and segment {segment}; expected at least 1.")
        self._segment = segment
        self._max_bytes = max_bytes
        self._shared = shared
        self._seed = hashlib.sha256(f"{identity}\0{segment}\0".encode())
        self._known: OrderedDict[bytes, _Prefix] = OrderedDict()
        # The keys of prefixes with a state, the one that was used longest ago first.
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._walks: OrderedDict[tuple[int, str], _Walk] = OrderedDict()
        self._num_bytes = self._hits = self._misses = self._tokens = self._evicted = 0
        self._lock = threading.Lock()

    def longest(self, tokens: np.ndarray, tenant: str = "") -> tuple[int, StreamState | None]:
        """How many of these tokens, from the first on, a kept state has been fed, and that state, which
        must not be changed; 0 and None if nothing is known.
        """
        with self._lock:
            for length, key in reversed(list(self._keys(tokens, self._begin(tenant)))):
                prefix = self._known.get(key)
                if prefix is not None and prefix.state is not None:
                    prefix.hit = True
                    self._place(key, prefix)
                    self._hits += 1
                    self._tokens += length
                    return length, prefix.state
            self._misses += 1
            return 0, None

    def wants(self, tokens: np.ndarray, num_bytes: int, tenant: str = "") -> bool:
        """Whether a state of so many bytes after all of these tokens would be kept: it is no copy of what is
        there, and not too large. It is asked before the state is copied, and notes that the prefix was seen.
        """
        with self._lock:
            if not len(tokens) or num_bytes > self._max_bytes:
                return False
            key = self._walked(tokens, tenant)
            prefix = self._known.get(key)
            if prefix is None or prefix.state is None:
                return True
            self._place(key, prefix)
            return False

    def put(self, tokens: np.ndarray, state: StreamState, tenant: str = "") -> None:
        """Keeps the state after all of these tokens: at a multiple of the segment, or at a prompt's end."""
        with self._lock:
            if not len(tokens) or state.num_bytes > self._max_bytes:
                return
            key = self._walked(tokens, tenant)
            prefix = self._known.setdefault(key, _Prefix())  # it may have been forgotten since it was noted
            if prefix.state is None:
                prefix.state = state
                self._num_bytes += state.num_bytes
            self._place(key, prefix)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._passed or self._kept)))
            self._forget()

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._known.clear()
            self._passed.clear()
            self._kept.clear()
            self._walks.clear()
            self._num_bytes = 0

    @property
    def facts(self) -> CacheFacts:
        """What the cache holds and has done since it was made."""
        with self._lock:
            return CacheFacts(
                states=len(self._passed) + len(self._kept),
                num_bytes=self._num_bytes,
                hits=self._hits,
                misses=self._misses,
                tokens=self._tokens,
                evicted=self._evicted,
            )

    def _walked(self, tokens: np.ndarray, tenant: str) -> bytes:
        """The key of these tokens, after all prefixes on the way to it were noted.

        The prefixes of one prompt come one after the other, as views of one array: each walk goes on where
        the one before has ended, or a long prompt would be hashed again with each of its pieces.
        """
        name = (tokens.__array_interface__["data"][0], tenant)
        array = tokens.base if isinstance(tokens.base, np.ndarray) else tokens
        walk = self._walks.pop(name, None)
        if (
            walk is None
            or walk.array() is not array
            or walk.length > len(tokens)
            or (walk.length < len(tokens) and walk.length % self._segment)
        ):
            walk = _Walk(array=weakref.ref(array), chain=self._begin(tenant))
        for length, key in self._keys(tokens, walk.chain, begin=walk.length):
            self._note(key, walk.key)
            walk.length = length
            walk.key = key
        self._walks[name] = walk
        while len(self._walks) > WALKS:
            self._walks.popitem(last=False)
        assert walk.key is not None
        return walk.key

    def _begin(self, tenant: str) -> hashlib._Hash:
        """The hash of what all prompts of a tenant to this artefact have in common."""
        chain = self._seed.copy()
        chain.update(b"" if self._shared else tenant.encode("utf-8", "surrogatepass"))
        chain.update(b"\0")
        return chain

    def _keys(
        self, tokens: np.ndarray, chain: hashlib._Hash, *, begin: int = 0
    ) -> Iterator[tuple[int, bytes]]:
        """Length and key of each prefix that a state may be kept for, the whole of the tokens last.

        chain: the hash of the first `begin` tokens; it is brought to the end.
        """
        content = np.ascontiguousarray(tokens[begin:], "<i8")
        for at in range(0, len(content), self._segment):
            piece = content[at : at + self._segment]
            chain.update(memoryview(piece).cast("B"))
            # A key depends on whether its last piece is whole: the rest of a prompt is fed behind padding.
            yield begin + at + len(piece), chain.digest() + len(piece).to_bytes(4, "little")

    def _note(self, key: bytes, before: bytes | None) -> None:
        """Remembers that a prefix was seen, and what it followed."""
        if key not in self._known:
            self._known[key] = _Prefix()
        self._known.move_to_end(key)
        parent = None if before is None else self._known.get(before)
        if before is not None and parent is not None and len(parent.followers) < 2:
            parent.followers.add(key)
            if parent.state is not None:
                (self._kept if parent.is_passed else self._passed).pop(before, None)
                (self._passed if parent.is_passed else self._kept).setdefault(before)

    def _place(self, key: bytes, prefix: _Prefix) -> None:
        """Puts a prefix with a state at the end of its class: it is the one that was used last."""
        self._passed.pop(key, None)
        self._kept.pop(key, None)
        (self._passed if prefix.is_passed else self._kept)[key] = None

    def _drop(self, key: bytes) -> None:
        """Drops a state; that its prefix was seen is still known."""
        prefix = self._known[key]
        assert prefix.state is not None
        self._num_bytes -= prefix.state.num_bytes
        prefix.state = None
        self._passed.pop(key, None)
        self._kept.pop(key, None)
        self._evicted += 1

    def _forget(self) -> None:
        """Forgets the prefixes without a state that were seen longest ago, beyond a bound."""
        while len(self._known) > KNOWN:
            key, prefix = next(iter(self._known.items()))
            if prefix.state is not None:
                self._drop(key)
            del self._known[key]
