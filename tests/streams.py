"""Feeding streams through sessions, as many tests do."""

from __future__ import annotations

import numpy as np

from runtimes import Memory, Session
from runtimes.base.logits import log_sum_exp


def feed(
    session: Session, tokens: np.ndarray, cuts: list[int], memory: Memory | None = None
) -> tuple[np.ndarray, Memory]:
    """Log-probabilities [B, N, V] of tokens [B, N] fed in segments of the given lengths."""
    memory = memory or session.start(len(tokens))
    pieces, at = [], 0
    for length in cuts:
        logits, memory = session.step(tokens[:, at : at + length], memory)
        pieces.append(logits - log_sum_exp(logits)[..., None])
        at += length
    assert at == tokens.shape[1], (at, tokens.shape)
    return np.concatenate(pieces, axis=1), memory


CUT = [8, 1, 7, 8, 8, 3, 8, 5]  # lengths of chained segments
PADDING = 9  # of the second row, before its text


def answers_with_padding(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities [2, N, V] over chained segments, the second row behind padding, which is left out."""
    memory = session.start(2)
    memory.positions[1] = -PADDING
    answer, _ = feed(session, rows(tokens, 2, sum(CUT)), CUT, memory)
    answer[1, :PADDING] = 0
    return answer


def rows(tokens: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Different parts of a text as the rows of a batch [B, N]."""
    return np.stack([tokens[row * 1000 : row * 1000 + length] for row in range(batch)])
