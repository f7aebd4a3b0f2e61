"""What the engine is asked to do for one stream, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from runtimes.contract.sampling import Sampler
from xl_export.serve.core.state import StreamState

# Why a task ended: the token that ends a document, a stop string, all tokens that were asked for, cancelled
# by its client or because that reads nothing, stopped with the server, failed by a fault (see `Ended.error`).
Reason = Literal["end", "stop", "length", "cancelled", "stopped", "failed"]
Arrays: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a task samples its tokens."""

    max_tokens: int
    """Most tokens to draw, at least 1."""
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 0
    """With `index`: the numbers come from `default_rng([seed, index])`, as in `runtimes.tasks.generate`, with
    the row as the index.
    """
    index: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text and are not part of it."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of token ids before anything else."""
    ends: bool = True
    """Whether the vocabulary's token for the end of a document ends the task."""
    prompt: np.ndarray | None = None
    """The token ids before the first drawn one, for `repetition_penalty`; None if they are the tokens of the
    task.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The work of one slot: feed tokens and then draw tokens, or compute one step of a model with named
    inputs. Tasks are compared by identity.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Token ids int64 [N], fed first; how they are cut depends only on `N` and `segment`. They may be empty
    if `state` has logits.
    """
    inputs: Arrays | None = None
    """Inputs [1, …] of a model with named inputs, as `runtimes.contract.checks.fitting_inputs` returns them;
    None for a language model.
    """
    state: StreamState | None = None
    """Stream to continue; None starts one at position 0."""
    score: bool = False
    """Whether log p of each fed token is wanted; it is unknown for the first token if `state` has no logits.
    """
    logits: bool = False
    """Whether the logits after each fed token are wanted."""
    top: int = 0
    """Number of likeliest tokens wanted with each log p."""
    sampling: SamplingParams | None = None
    """None draws no tokens."""
    keep: bool = False
    """Whether the state at the end is wanted; then every drawn token is fed, the last one too."""
    cached: bool = True
    """Whether a prefix of `tokens` may come from the prefix cache, and its snapshots be kept there; a state,
    `score` and `logits` exclude both.
    """
    owner: str = ""
    """Name of the API key; empty without keys."""


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    """The likeliest tokens at N places, in descending order: ids int64 [N, k], log_probs float32 [N, k]."""

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PromptFed:
    """Some of the task's own tokens were fed, or found in the prefix cache: one chunk if `Task.score`,
    `Task.logits` or `Task.inputs`, and otherwise all of them, or those that were fed before the task ended.
    """

    count: int
    """Number of tokens fed."""
    cached: int = 0
    """Number of tokens found in the cache."""
    log_probs: np.ndarray | None = None
    """Log-probabilities float32 [count] in nats if `Task.score`, NaN for an unknown one; None otherwise."""
    likeliest: Likeliest | None = None
    """Alternatives to the fed tokens, if `Task.top`."""
    outputs: Arrays | None = field(default=None, repr=False)
    """Outputs [1, …] of the step by name if `Task.inputs`, its logits [1, count, V] if `Task.logits`."""


@dataclass(slots=True)  # freezing it would take half of the time that a token costs here
class TokenOut:
    """One drawn token, which does not change once it is delivered. It is not frozen, so it has no hash."""

    token: int
    text: str
    """Text that the token adds, without what may become a stop string."""
    log_prob: float | None = None
    """Log-probability at temperature 1 without bias, if `Task.score` or `Task.top`."""
    likeliest: Likeliest | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last answer of every task, whatever happened."""

    reason: Reason
    text: str = ""
    """Text that was held back for a stop string."""
    state: StreamState | None = field(default=None, repr=False)
    """Stream after all tokens that the answers have reported, if `Task.keep`; for `cancelled` and `stopped`
    too.
    """
    error: str = ""
    """One sentence, if the reason is `failed`, or the engine itself has cancelled."""


Answer: TypeAlias = PromptFed | TokenOut | Ended
Delivery: TypeAlias = list[tuple[Task, list[Answer]]]
