"""Taking back the last tokens of a stream, exactly or not at all."""

from __future__ import annotations

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.contract.rule import MemoryRule
from xl_export.serve.core.state import StreamState


def most_rewound(state: StreamState, rule: MemoryRule) -> int:
    """How many of its last tokens a stream can take back.

    The ring has a slot for each of M + T positions. So the M tokens before a position are all there as long
    as no more than T positions behind it were ever written (padding counts).
    """
    return max(0, min(state.position, len(state.tail), state.position - state.written + rule.segment))


def rewound(state: StreamState, count: int, rule: MemoryRule) -> tuple[StreamState, np.ndarray]:
    """The stream before its last `count` tokens, and the token, int64 [0..1], that has to be fed to it then.

    That token is the last one that stays. Feeding it again gives the logits after it; where the ring does not
    hold all that it has seen, there is none, and the stream has no logits until something is appended. The
    given state stays as it is. Raises StreamError for more tokens than can be taken back exactly.
    """
    most = most_rewound(state, rule)
    if not 0 <= count <= most:
        raise StreamError(
            f"tokens is {count}, and this stream can take back 0 to {most} now; fork it before you append "
            "what may have to be taken back, or restore a snapshot."
        )
    if count == 0:
        return state, np.empty(0, np.int64)
    last = 1 if count < most and state.position > count else 0
    memory = state.memory.copy()
    memory.positions -= count + last
    kept = len(state.tail) - count
    tail = state.tail[: kept - last]
    before = StreamState(memory=memory, logits=None, tail=tail, written=state.written)
    return before, state.tail[kept - last : kept]
