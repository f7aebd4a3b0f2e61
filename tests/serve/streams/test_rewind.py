"""A stream that was taken back goes on as if what was taken back had never been."""

from __future__ import annotations

import numpy as np
import pytest

from runtimes import Session
from runtimes.base.errors import StreamError
from runtimes.base.logits import log_sum_exp
from tests.serve.streams.conftest import Advance
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.rewind import most_rewound, rewound


def test_rewound_streams_go_on_as_if_nothing_had_been(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """From every length, by every number of tokens, behind whole and padded pieces; the ring is full or not.
    Then a segment of other tokens comes, which sees all of the memory.
    """
    segment, going_on = session.rule.segment, tokens[5000:5008]
    expected: dict[int, StreamState] = {}

    def straight(length: int) -> StreamState:
        if length not in expected:
            expected[length] = advance(fresh, tokens[:length])
        return expected[length]

    counts = set()
    for length in (1, 2, 7, 8, 9, 16, 40, 43, 61):
        state = straight(length)
        most = most_rewound(state, session.rule)
        for count in range(most + 1):
            before, last = rewound(state, count, session.rule)
            taken = advance(before, last) if len(last) else before
            other = straight(length - count)
            counts.add(count)
            assert taken.position == other.position == length - count
            assert taken.tail.tolist() == other.tail[len(other.tail) - len(taken.tail) :].tolist()
            if taken.logits is not None and other.logits is not None:
                assert distance(taken.logits, other.logits) <= 1e-4, (length, count)
            assert (taken.logits is None) == (count > 0 and len(last) == 0)
            found, wanted = advance(taken, going_on), advance(other, going_on)
            assert found.position == wanted.position
            assert found.logits is not None
            assert wanted.logits is not None
            assert distance(found.logits, wanted.logits) <= 1e-4, (length, count)
        assert state is straight(length), "the state stays as it is"
        with pytest.raises(
            StreamError, match=f"tokens is {most + 1}, and this stream can take back 0 to {most} "
        ):
            rewound(state, most + 1, session.rule)
    assert counts == set(range(segment + 1))


def test_one_token_more_would_be_wrong(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """The bound is no larger than it may be: behind it a slot that is seen was written over."""
    state = advance(fresh, tokens[:40])
    assert most_rewound(state, session.rule) == session.rule.segment
    memory = state.memory.copy()
    memory.positions -= session.rule.segment + 1
    wrong = StreamState(memory=memory, logits=None, tail=state.tail, written=40)
    expected = advance(advance(fresh, tokens[:31]), tokens[5000:5001])
    found = advance(wrong, tokens[5000:5001])
    assert found.logits is not None
    assert expected.logits is not None
    assert distance(found.logits, expected.logits) > 1e-3


def test_a_negative_number_is_refused(session: Session, fresh: StreamState) -> None:
    with pytest.raises(StreamError, match="can take back 0 to 0 now"):
        rewound(fresh, -1, session.rule)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two log-probability vectors, in nats."""
    return float(np.abs((one - log_sum_exp(one)) - (other - log_sum_exp(other))).max())
