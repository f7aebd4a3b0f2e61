"""What a row is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from runtimes.contract.sampling import Sampler
from xl_export.serve.core.state import StreamState

# Why a task ended: the token that ends a document, a stop string, all tokens that were asked for, cancelled
# by its client, stopped because the server stops, failed by a fault (see `Ended.error`).
Reason = Literal["end", "stop", "length", "cancelled", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a task samples its tokens."""

    #: Most tokens to draw, at least 1.
    max_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    #: With `index`: the numbers come from `default_rng([seed, index])`, as in `runtimes.tasks.generate`,
    #: with the row as the index.
    seed: int = 0
    index: int = 0
    #: Strings that end the text and are not part of it.
    stop: tuple[str, ...] = ()
    #: Added to the logits of token ids before anything else.
    bias: Mapping[int, float] = field(default_factory=dict)
    #: Whether the vocabulary's token for the end of a document ends the task.
    ends: bool = True
    #: The token ids before the first drawn one, for `repetition_penalty`; None if they are the tokens of the
    #: task.
    prompt: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The work of one row: feed tokens, then draw tokens. Tasks are compared by identity."""

    #: int64 [N], fed first; how they are cut depends only on `N` and `segment`. It may be empty if `state`
    #: has logits.
    tokens: np.ndarray
    #: Where the stream continues; None starts a text at position 0.
    state: StreamState | None = None
    #: Whether log p of each fed token is wanted; it is unknown for the first token if `state` has no logits.
    score: bool = False
    #: How many of the likeliest tokens are wanted with each log p.
    top: int = 0
    #: None only feeds.
    sampling: SamplingParams | None = None
    #: Whether the state at the end is wanted; then every drawn token is fed, the last one too.
    keep: bool = False
    #: Whether a prefix of `tokens` may come from the prefix cache, and its snapshots be kept there; a state
    #: or `score` excludes both.
    cached: bool = True
    #: Name of the API key; empty without keys.
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    """The likeliest tokens at N places, in descending order: ids int64 [N, k], log_probs float32 [N, k]."""

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PromptFed:
    """Some of the task's own tokens were fed, or found in the prefix cache: one piece if `Task.score`, and
    otherwise all of them, or those that were fed before the task ended.
    """

    #: Number of tokens fed.
    count: int
    #: Number of tokens found in the cache.
    cached: int = 0
    #: float32 [count] in nats if `Task.score`, NaN for an unknown one; None otherwise.
    log_probs: np.ndarray | None = None
    #: If `Task.top`.
    likeliest: Likeliest | None = None


@dataclass(slots=True)  # freezing it would take half of the time that a token costs here
class TokenOut:
    """One drawn token, which does not change once it is delivered. It is not frozen, so it has no hash."""

    token: int
    #: What it adds to the text, without what may become a stop string.
    text: str
    #: Under the model at temperature 1 without bias, if `Task.score` or `Task.top`.
    log_prob: float | None = None
    likeliest: Likeliest | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last answer of every task, whatever happened."""

    reason: Reason
    #: What was held back for a stop string.
    text: str = ""
    #: Of the stream after all tokens that the answers have reported, if `Task.keep`; for `cancelled` and
    #: `stopped` too.
    state: StreamState | None = field(default=None, repr=False)
    #: One sentence, if the reason is `failed`, or the engine itself has cancelled.
    error: str = ""


Answer: TypeAlias = PromptFed | TokenOut | Ended
Delivery: TypeAlias = list[tuple[Task, list[Answer]]]
