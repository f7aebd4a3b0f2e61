"""The prefix cache: states of streams after the beginnings of prompts, so that they are fed once.

A state is kept under the hash of everything that it depends on: the artefact, the API key, and all tokens
before. A prompt is cut from its own beginning into pieces of a segment. So at a multiple of the segment every
prompt that begins with the same tokens has been fed in the same pieces, and a state from the cache is bit for
bit what feeding would give. The end of a prompt that is no multiple was fed as a padded piece. Its state
only serves the same whole prompt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xl_export.serve.core.state import StreamState

MAX_PREFIXES = 1 << 16  # prefixes whose hash is remembered after their state was dropped


@dataclass
class _Prefix:
    """A prefix that was seen."""

    state: StreamState | None = field(default=None, repr=False)
    followers: set[bytes] = field(default_factory=set)
    """The different pieces that have followed it, two of them at most: with two it is a place at which
    prompts part.
    """
    hit: bool = False

    @property
    def is_passed(self) -> bool:
        """Whether only one prompt went through it, on its way to a longer prefix."""
        return not self.hit and len(self.followers) == 1


class PrefixCache:
    """States after prefixes of prompts, bounded in bytes. One thread uses it; any may read the metrics.

    What was not used for the longest time is dropped first, in two classes: first the states in the middle of
    one prompt, which serve only a prompt that parts from it just there, and then the others: ends of prompts,
    places at which prompts part, and what was found before. So one long prompt replaces its own states and
    not everyone else's.
    """

    def __init__(self, *, identity: str, segment: int, max_bytes: int, shared: bool = False) -> None:
        """identity: of the session. shared: whether API keys may find each other's prefixes. Then the time to
        the first token reveals to a client whether another one has sent the same prompt.
        """
        self._segment = segment
        self.max_bytes = max_bytes
        self._shared = shared
        self._seed = hashlib.sha256(f"{identity}\0{segment}\0".encode())
        self._known: OrderedDict[bytes, _Prefix] = OrderedDict()
        # The keys of prefixes with a state, the one that was used longest ago first.
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all states."""
        self.evicted = 0
        """Number of states dropped."""

    @property
    def states(self) -> int:
        """How many states there are."""
        return len(self._passed) + len(self._kept)

    def keys(self, tokens: np.ndarray, owner: str = "") -> list[bytes]:
        """The key of each prefix that a state may be kept for: after each piece, the whole of the tokens
        last.
        """
        chain = self._seed.copy()
        chain.update(b"" if self._shared else owner.encode("utf-8", "surrogatepass"))
        chain.update(b"\0")
        content = np.ascontiguousarray(tokens, "<i8")
        keys = []
        for at in range(0, len(content), self._segment):
            piece = content[at : at + self._segment]
            chain.update(memoryview(piece).cast("B"))
            # A key depends on whether its last piece is whole: the rest of a prompt is fed behind padding.
            keys.append(chain.digest() + len(piece).to_bytes(4, "little"))
        return keys

    def longest(self, keys: Sequence[bytes]) -> StreamState | None:
        """The state after the longest prefix of a prompt that is kept, which must not be changed."""
        for key in reversed(keys):
            prefix = self._known.get(key)
            if prefix is not None and prefix.state is not None:
                prefix.hit = True
                self._place(key, prefix)
                return prefix.state
        return None

    def wants(self, keys: Sequence[bytes]) -> bool:
        """Whether a state after all pieces of these keys is new. It is asked before the state is copied, and
        notes that the prefix was seen.
        """
        key = keys[-1]
        prefix = self._known.setdefault(key, _Prefix())
        self._known.move_to_end(key)
        before = keys[-2] if len(keys) > 1 else None
        parent = None if before is None else self._known.get(before)
        if before is not None and parent is not None and len(parent.followers) < 2:
            parent.followers.add(key)
            if parent.state is not None:
                (self._kept if parent.is_passed else self._passed).pop(before, None)
                (self._passed if parent.is_passed else self._kept).setdefault(before)
        if prefix.state is None:
            return True
        self._place(key, prefix)
        return False

    def put(self, key: bytes, state: StreamState) -> None:
        """Keeps a state that `wants` has just asked for."""
        prefix = self._known[key]
        prefix.state = state
        self.num_bytes += state.num_bytes
        self._place(key, prefix)
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._passed or self._kept)))
        while len(self._known) > MAX_PREFIXES:  # the prefix that was seen longest ago is forgotten
            key, prefix = next(iter(self._known.items()))
            if prefix.state is not None:
                self._drop(key)
            del self._known[key]

    def _place(self, key: bytes, prefix: _Prefix) -> None:
        """Puts a prefix with a state at the end of its class: it is the one that was used last."""
        self._known.move_to_end(key)
        self._passed.pop(key, None)
        self._kept.pop(key, None)
        (self._passed if prefix.is_passed else self._kept)[key] = None

    def _drop(self, key: bytes) -> None:
        """Drops a state; that its prefix was seen is still known."""
        prefix = self._known[key]
        assert prefix.state is not None
        self.num_bytes -= prefix.state.num_bytes
        prefix.state = None
        self._passed.pop(key, None)
        self._kept.pop(key, None)
        self.evicted += 1
