"""What a row is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from runtimes.base.errors import UserError, first_line
from runtimes.contract.sampling import Sampler
from xl_export.serve.core.state import StreamState

# Why a task ended: the token that ends a document, a stop string, all tokens that were asked for, cancelled
# by its client, stopped because the server stops, failed by a fault (see `Ended.error`).
Reason = Literal["end", "stop", "length", "cancelled", "stopped", "failed"]
# What `Ended.error` says where the model or the memory is at fault.
NOT_FINITE = (
    "the model's logits are not finite, so nothing can be said of the next token; its weights are damaged or "
    "diverged, or the stream that it continues is damaged."
)
NO_ROOM = (
    "the client takes no answers, and the memory for streams that wait for their clients is full; take "
    "answers sooner, or give the server more memory."
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a task draws its tokens.

    max_tokens: at least 1. seed, index: the numbers are those of `default_rng([seed, index])`, as in
    `runtimes.tasks.generate`, where the index is the row. stop: strings that end the text and are no part of
    it. bias: added to the logits of token ids before anything else. ends: whether the vocabulary's token for
    the end of a document ends the task. prompt: the token ids before the first drawn one, for
    `repetition_penalty`; None where they are the tokens of the task.
    """

    max_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 0
    index: int = 0
    stop: tuple[str, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    ends: bool = True
    prompt: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The work of one row: feed tokens, then draw tokens. A task is known by its object, not by its content.

    tokens: int64 [N], fed first, cut by `N` and `segment` alone. It may be empty where `state` has logits.
    state: where the stream goes on; None starts a text at position 0. score: whether log p of each fed token
    is wanted; it is unknown for the first token where `state` has no logits. top: how many of the likeliest
    tokens are wanted beside each log p. drawing: None only feeds. keep: whether the state at the end is
    wanted; then every drawn token is fed, the last one too. cached: whether a prefix of `tokens` may come
    from the prefix cache, and its snapshots be kept there; a state or `score` excludes both. tenant: whose
    task it is. bulk: whether it yields to tasks that people wait for.
    """

    tokens: np.ndarray
    state: StreamState | None = None
    score: bool = False
    top: int = 0
    drawing: Drawing | None = None
    keep: bool = False
    cached: bool = True
    tenant: str = ""
    bulk: bool = False


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    """The likeliest tokens at N places, in descending order: ids int64 [N, k], log_probs float32 [N, k]."""

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Fed:
    """Some of the task's own tokens were fed, or found in the prefix cache: one piece where `Task.score`, and
    otherwise all pieces that no answer has reported yet.

    count: of the tokens. cached: how many of them were found. log_probs: float32 [count] in nats where
    `Task.score`, NaN where a token's is not known; None otherwise. likeliest: where `Task.top`.
    """

    count: int
    cached: int = 0
    log_probs: np.ndarray | None = None
    likeliest: Likeliest | None = None


@dataclass(slots=True)  # freezing it would take half of the time that a token costs here
class Drawn:
    """One drawn token; nobody changes it once it is delivered. It has no hash, because it is not frozen.

    text: what it adds to the text, without what may become a stop string. log_prob: under the model at
    temperature 1 without bias, where `Task.score` or `Task.top`.
    """

    token: int
    text: str
    log_prob: float | None = None
    likeliest: Likeliest | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last answer of every task, whatever happened. text: what was held back for a stop string.

    state: of the stream after all tokens that the answers have reported, where `Task.keep`; for `cancelled`
    and `stopped` too. error: one sentence, where the reason is `failed`, or the engine itself has cancelled.
    """

    reason: Reason
    text: str = ""
    state: StreamState | None = field(default=None, repr=False)
    error: str = ""


Answer: TypeAlias = Fed | Drawn | Ended
Delivery: TypeAlias = list[tuple[Task, list[Answer]]]


def fault_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error):.200}"


def fault_sentence(error: Exception) -> str:
    """The sentence for the client of a task that failed with this error."""
    if isinstance(error, UserError):
        return str(error)
    return (
        f"the model's step failed ({fault_line(error)}); ask again, and tell the operator if it fails again."
    )
