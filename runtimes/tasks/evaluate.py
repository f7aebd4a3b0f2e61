"""Scoring a text: the negative log-likelihood of every token, given all tokens that the memory holds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtimes.base.errors import DivergedError, StreamError, TextError
from runtimes.base.logits import IMPOSSIBLE, clamped
from runtimes.base.ranges import Range
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss of a model on a text, and the settings that it depends on."""

    tokens: int
    """The number of predicted tokens."""
    nats: float
    """Their total loss."""
    seconds: float
    segment: int
    lanes: int
    memory_carried: bool
    """Whether segments began with the memory of the one before."""
    rule: MemoryRule
    token_nats: np.ndarray = field(repr=False)
    """[N - 1]: the loss of each token after the first, in order."""

    @property
    def impossible(self) -> int:
        """How many of the tokens the model deems impossible. Each counts as -IMPOSSIBLE nats, so that the
        total is a number.
        """
        return int((self.token_nats >= -IMPOSSIBLE).sum())

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The scores, and every setting that they depend on."""
        return {
            "tokens": self.tokens,
            "impossible": self.impossible,
            "nats": self.nats,
            "nats_per_token": self.nats_per_token,
            "bits_per_token": self.bits_per_token,
            "perplexity": self.perplexity,
            "tokens_per_second": self.tokens_per_second,
            "lanes": self.lanes,
            "segment": self.segment,
            "memory_carried": self.memory_carried,
            "mem_len": self.rule.mem_len,
            "mask": self.rule.mask,
            "clamp_len": self.rule.clamp_len,
            "initial_memory": self.rule.initial_memory,
        }


def evaluate(
    session: Session,
    tokens: np.ndarray,
    *,
    lanes: int = 1,
    segment: int | None = None,
    carry_memory: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """The score of tokens [N]. Every token but the first is predicted exactly once.

    lanes: the text is cut into this many contiguous parts, which advance in parallel as rows of a batch. The
    first prediction of each part sees one token of context. segment: tokens per step; None for the session's
    maximum. The last segment may be shorter. carry_memory: False starts every segment with empty
    memory. progress: called after every step with the number of tokens predicted so far. Raises TextError for
    fewer than two tokens, StreamError for lanes or segments that do not fit, DivergedError as soon as the
    loss of a token is not a number. An impossible token has the loss -IMPOSSIBLE.
    """
    tokens, segment, starts = checked_lanes(session, tokens, lanes=lanes, segment=segment)
    began = time.perf_counter()
    token_nats = nats_of_lanes(
        session, tokens, starts, segment=segment, carry_memory=carry_memory, progress=progress
    )
    seconds = time.perf_counter() - began
    return Score(
        tokens=len(token_nats),
        nats=float(token_nats.sum()),
        seconds=seconds,
        segment=segment,
        lanes=lanes,
        memory_carried=carry_memory,
        rule=session.rule,
        token_nats=token_nats,
    )


def checked_lanes(
    session: Session, tokens: np.ndarray, *, lanes: int, segment: int | None
) -> tuple[np.ndarray, int, list[int]]:
    """The tokens [N], the number of tokens per step, and the first token of each lane with the end of the
    last one; raises as `evaluate` does for what does not fit.
    """
    segment = session.rule.segment if segment is None else segment
    accepted = Range(1, session.rule.segment, whole=True)
    if segment not in accepted:
        raise StreamError(
            f"segment is {segment}; expected {accepted.expected}, or export with a larger --segment."
        )
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise StreamError(f"tokens are {tokens.dtype} {list(tokens.shape)}; expected integers [N].")
    targets = len(tokens) - 1
    if targets < 1:
        raise TextError(
            "the text has fewer than 2 tokens, one to see and one to predict; give a longer text."
        )
    if lanes not in Range(1, targets, whole=True):
        raise StreamError(f"lanes is {lanes}; expected 1 to {targets}, the number of tokens to predict.")
    return tokens, segment, [targets * lane // lanes for lane in range(lanes + 1)]


def nats_of_lanes(
    session: Session,
    tokens: np.ndarray,
    starts: Sequence[int],
    *,
    segment: int,
    carry_memory: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The loss [targets] of each token after the first of some neighbouring lanes of a text, in order.

    starts: of these lanes in the text, and the end of the last one. tokens: of the text from starts[0] to
    that end, both included. The rest is as in `evaluate`.
    """
    lanes = len(starts) - 1
    before = starts[0]
    # Lanes differ in length by one token at most. A shorter lane ends in padding, whose target -1 is not
    # counted.
    longest = max(np.diff(starts))
    inputs_BN = np.zeros((lanes, longest), np.int64)
    targets_BN = np.full((lanes, longest), -1, np.int64)
    for lane, (first, last) in enumerate(itertools.pairwise(starts)):
        inputs_BN[lane, : last - first] = tokens[first - before : last - before]
        targets_BN[lane, : last - first] = tokens[first - before + 1 : last - before + 1]
    nats_BN = np.zeros((lanes, longest), np.float64)
    memory = session.start(lanes)
    for at in range(0, longest, segment):
        piece = slice(at, at + segment)
        if not carry_memory:
            memory.positions[:] = 0
        log_probs, memory = session.score(inputs_BN[:, piece], targets_BN[:, piece], memory)
        nats_BN[:, piece] = -clamped(log_probs)
        if np.isnan(log_probs).any():
            lane, column = np.argwhere(np.isnan(nats_BN))[0]
            raise not_a_number(session, f"token {starts[lane] + column + 1:,} of the text")
        progress(min(piece.stop * lanes, starts[-1] - before))
    token_nats: np.ndarray = nats_BN[targets_BN >= 0]
    return token_nats


def not_a_number(session: Session, where: str) -> DivergedError:
    """The error for a log-probability that is NaN."""
    return DivergedError(
        f"the model {session.identity:.12} gives {where} a log-probability that is not a number; its "
        "training has diverged or its weights are damaged: take an earlier checkpoint, or train, import or "
        "export it again."
    )
