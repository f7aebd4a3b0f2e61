"""One stream outside of the rows: all that is needed to go on with it exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.base.ranges import counted
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A stream as it was after its last fed token."""

    memory: Memory = field(repr=False)
    """One row, owned by this state and never stepped: the engine copies it into a row."""
    logits: np.ndarray | None = field(repr=False)
    """float32 [V], of the token after the last one; None at the start of a stream, after a rewind, and for a
    model with named inputs.
    """
    tail: np.ndarray = field(repr=False)
    """int64 [0..T + 1], the ids of the last fed tokens, the newest last: a decoder continues from them, and a
    rewind feeds one of them again. Empty for a model with named inputs.
    """
    furthest: int
    """One more than the highest stream position whose slot was ever written. Padding on the right is written
    too, so this may be more than `position`; it bounds how far the stream can be rewound.
    """

    @staticmethod
    def begin(session: Session) -> StreamState:
        """A stream that has been fed nothing."""
        return StreamState(memory=session.start(1), logits=None, tail=np.empty(0, np.int64), furthest=0)

    @property
    def position(self) -> int:
        """The number of tokens that the stream has been fed."""
        return int(self.memory.positions[0])

    @property
    def num_bytes(self) -> int:
        """The size of the state in bytes, nearly all of it memory tensors."""
        logits = [] if self.logits is None else [self.logits]
        return sum(int(array.nbytes) for array in (*self.memory.tensors.values(), self.tail, *logits))


def rewound(state: StreamState, count: int, *, session: Session) -> tuple[StreamState, np.ndarray]:
    """The stream `count` tokens before its end, as a state that is one token further back, and the id int64
    [1] of that token: when it is fed, the logits of the next one are known again. At the very start of a
    stream there is no such token, and the ids are empty.

    The new state shares its arrays with the old one, which stays as it is: the tokens that were taken back
    are overwritten when the stream continues. That is exact while nothing has been written over what the
    earlier tokens see, padding included, so from half of a segment to nearly all of it. Raises
    StreamError otherwise.
    """
    position = state.position
    if not 0 <= count <= position:
        raise StreamError(f"cannot take back {counted(count, 'token')}; the stream has {position}.")
    nothing = np.empty(0, np.int64)
    if count == position:
        return StreamState.begin(session), nothing
    if session.spec is None or not session.spec.circular:
        raise StreamError(
            "only a ring of an artefact can be rewound in part; take back all of the stream, or fork it "
            "before what you may want to take back."
        )
    most = most_rewound(state, session=session)
    if count > most:
        raise StreamError(
            f"cannot take back {counted(count, 'token')}; the memory still holds what came before the last "
            f"{most}; take back fewer, or continue from an earlier snapshot."
        )
    memory = Memory(np.array([position - count - 1]), dict(state.memory.tensors), state.memory.owner)
    memory.unsure = state.memory.unsure
    place = len(state.tail) - count - 1
    back = StreamState(memory=memory, logits=None, tail=state.tail[:place], furthest=state.furthest)
    return back, state.tail[place : place + 1]


def most_rewound(state: StreamState, *, session: Session) -> int:
    """How many of its last tokens `rewound` takes back; all of a stream is taken back from anywhere."""
    if session.spec is None or not session.spec.circular:
        return 0
    # Position p sees back to p - M, whose slot was taken by p - M + S as soon as that was written; S = M + T.
    # One token more is taken back, and fed again.
    most = max(0, min(state.position - state.furthest + session.rule.segment, len(state.tail)) - 1)
    return state.position if most + 1 >= state.position else most
