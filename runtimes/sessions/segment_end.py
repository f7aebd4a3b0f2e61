"""A trial that shows whether a row of a session may be padded on the right."""

from __future__ import annotations

import numpy as np

from runtimes.contract.session import Session

TRIED_TOKENS = 16
TRIED_ROWS = 4
# In nats, for each nat of the answer beyond the first: more than what rounding to fp16 or int8 changes, and
# less than what other positions change.
TOLERANCE = 1e-3


def sees_segment_end(session: Session) -> bool | None:
    """Whether the answer to a token depends on how many tokens follow it in its segment.

    This is so for positions that count from the end of the segment. Not every session knows whether it has
    them, so a few tokens are scored on new streams, with and without others after them. None if a score is
    NaN, which shows nothing.
    """
    tokens = np.arange(TRIED_ROWS)[:, None] % session.vocab.size
    answers = []
    for width in (1, min(TRIED_TOKENS, session.rule.segment)):
        inputs = np.repeat(tokens, width, axis=1)
        log_probs, _ = session.score(inputs, inputs, session.start(TRIED_ROWS))
        answers.append(log_probs[:, 0].astype(np.float64))
    alone, followed = answers
    if np.isnan(answers).any():
        return None
    finite = np.isfinite(alone)
    if (finite != np.isfinite(followed)).any():
        return True
    difference = np.abs(alone[finite] - followed[finite])
    return bool((difference > TOLERANCE * np.maximum(1, np.abs(alone[finite]))).any())
