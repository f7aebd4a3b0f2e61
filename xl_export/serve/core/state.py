"""One stream outside of the rows: all that is needed to go on with it exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtimes.contract.memory import Memory


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A stream as it was after its last fed token.

    memory: one row, owned by this state, which nobody steps: the engine copies it into a row. logits: float32
    [V], of the token after the last one; None at the start of a stream, and after a rewind. tail: int64
    [0..T + 1], the ids of the last fed tokens, the newest last: a decoder goes on from them, and a rewind
    feeds one of them again. written: one more than the highest stream position whose slot was ever written.
    Padding on the right is written too, so this may be more than `position`; it bounds how far the stream
    can be rewound.
    """

    memory: Memory = field(repr=False)
    logits: np.ndarray | None = field(repr=False)
    tail: np.ndarray = field(repr=False)
    written: int

    @property
    def position(self) -> int:
        """The number of tokens that the stream has been fed."""
        return int(self.memory.positions[0])

    @property
    def num_bytes(self) -> int:
        """The size of the state in bytes, nearly all of it memory tensors."""
        logits = [] if self.logits is None else [self.logits]
        return sum(int(array.nbytes) for array in (*self.memory.tensors.values(), self.tail, *logits))
