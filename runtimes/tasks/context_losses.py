"""The loss of tokens given a context of exactly one length. RECL is computed from these losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtimes.base.errors import StreamError, TextError
from runtimes.base.logits import clamped
from runtimes.base.machine import memory_bytes
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.tasks.evaluate import not_a_number
from runtimes.tasks.sweep import refuse_if_too_large

MAX_ROWS = 64  # windows side by side; more are hardly faster


def spread_positions(num_tokens: int, *, count: int, longest: int) -> np.ndarray:
    """`count` positions [N] of a text, spread evenly over those that have at least `longest` tokens before
    them.

    Raises TextError for a text with fewer such positions.
    """
    available = max(0, num_tokens - longest)
    if count > available:
        raise TextError(
            f"the text has {num_tokens:,} tokens, {available:,} of them after {longest:,} others, and "
            f"{count:,} are asked for; give a longer text, shorter --lengths or fewer --positions."
        )
    return longest + np.arange(count) * available // count


def refuse_beyond_context(sessions: Sequence[Session], longest: int) -> None:
    """Raises StreamError if no model of the group can see `longest` tokens at once.

    A model that sees fewer takes part with what it can see, as the paper's Transformer does in Table 8.
    Memory of the form `own` may be a recurrent state, which sees any number.
    """
    if any(session.spec is not None and session.spec.form == "own" for session in sessions):
        return
    visible = 1 + max(session.rule.longest_distance for session in sessions)
    if longest > visible:
        raise StreamError(
            f"--lengths goes to {longest} and no model given sees more than {visible} tokens; give shorter "
            "lengths, a larger --mem-len for runs, or export with a larger --mem-len."
        )


def context_losses(
    session: Session, tokens: np.ndarray, positions: np.ndarray, *, context: int
) -> np.ndarray:
    """The loss in nats, float32 [N], of each of tokens[positions] given the `context` tokens before it and no
    others.

    Windows are rows of a batch and are fed from position 0 in pieces. The short piece comes first, so that
    under the `full` mask, too, the last token sees as much as it may. Raises DivergedError for a model whose
    losses are not numbers.
    """
    step_bytes = session.step_bytes(segment=session.rule.segment)
    rows = min(MAX_ROWS, max(1, memory_bytes() // (4 * step_bytes)))  # a quarter of this machine's memory
    refuse_if_too_large(session, rows=rows, segment=session.rule.segment)
    nats = np.empty(len(positions), np.float32)
    memory = session.start(min(rows, len(positions)))
    for at in range(0, len(positions), rows):
        batch = positions[at : at + rows]
        if memory.batch != len(batch):
            memory = session.start(len(batch))
        windows = np.asarray(tokens[batch[:, None] + np.arange(-context, 0)], np.int64)
        nats[at : at + rows], memory = _last_losses(
            session, windows, np.asarray(tokens[batch], np.int64), memory
        )
    if (wrong := np.flatnonzero(np.isnan(nats))).size:
        raise not_a_number(session, f"token {positions[wrong[0]]:,} of the text")
    return nats


def _last_losses(
    session: Session, windows: np.ndarray, answers: np.ndarray, memory: Memory
) -> tuple[np.ndarray, Memory]:
    """Nats [B] of the answers [B], each after the last token of its window [B, c]."""
    segment = session.rule.segment
    context = windows.shape[1]
    targets = np.full_like(windows, -1)
    targets[:, -1] = answers
    memory.positions[:] = 0
    at = 0
    while at < context:
        piece = slice(at, at + ((context - at) % segment or segment))
        log_probs, memory = session.score(windows[:, piece], targets[:, piece], memory)
        at = piece.stop
    return -clamped(log_probs[:, -1]), memory
