"""A trial that shows whether a row of a session may be padded on the right."""

from __future__ import annotations

import numpy as np

from runtimes.contract.session import Session

TRIED_TOKENS = 16  # of a segment
TRIED_IDS = 4
# In nats, for each nat of the answer beyond the first: more than what rounding to fp16 or int8 changes, and
# less than what other positions change.
TOLERANCE = 1e-3


def sees_segment_end(session: Session, *, rows: int) -> bool | None:
    """Whether the answer to a token depends on how many tokens follow it in its segment.

    This is so for positions that count from the end of the segment. Not every session knows whether it has
    them, so a few tokens are scored on new streams, with and without others after them. None if a score is
    NaN, which shows nothing.

    rows: the most rows of a step here; an engine accepts no more than it was built for.
    """
    rows = min(rows, TRIED_IDS)
    answers = []
    for width in (1, min(TRIED_TOKENS, session.rule.segment)):
        scores = []
        for first in range(0, TRIED_IDS, rows):
            ids = np.arange(first, first + rows) % session.vocab.size
            tokens = np.repeat(ids[:, None], width, axis=1)
            log_probs, _ = session.score(tokens, tokens, session.start(rows))
            scores.append(log_probs[:, 0])
        answers.append(np.concatenate(scores).astype(np.float64))
    alone, followed = answers
    if np.isnan(answers).any():
        return None
    finite = np.isfinite(alone)
    if (finite != np.isfinite(followed)).any():
        return True
    difference = np.abs(alone[finite] - followed[finite])
    return bool((difference > TOLERANCE * np.maximum(1, np.abs(alone[finite]))).any())
