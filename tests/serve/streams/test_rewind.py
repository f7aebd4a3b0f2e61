"""A stream that was taken back goes on as if what was taken back had never been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.base.errors import StreamError
from runtimes.base.logits import log_sum_exp
from tests.serve.streams.conftest import Advance
from xl_export.serve.core.state import StreamState, most_rewound, rewound


def test_rewound_streams_go_on_as_if_nothing_had_been(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """From every length, by every number of tokens, behind whole and padded pieces; the ring is full or not.
    Then a segment of other tokens comes, which sees all of the memory.
    """
    segment, going_on = session.rule.segment, tokens[5000:5008]
    straight = {length: advance(fresh, tokens[:length]) for length in range(62)}
    counts = set()
    for length in (1, 2, 7, 8, 9, 16, 40, 43, 61):
        state = straight[length]
        most = most_rewound(state, session=session)
        for count in range(1, most + 1):
            before, last = rewound(state, count, session=session)
            taken, other = advance(before, last), straight[length - count]
            counts.add(count)
            assert taken.position == other.position == length - count
            assert taken.tail.tolist() == other.tail[len(other.tail) - len(taken.tail) :].tolist()
            assert (taken.logits is None) == (count == length)
            if taken.logits is not None:
                assert distance(taken, other) <= 1e-4, (length, count)
            found, wanted = advance(taken, going_on), advance(other, going_on)
            assert found.position == wanted.position
            assert distance(found, wanted) <= 1e-4, (length, count)
        assert state.position == length, "the state stays as it is"
        for count in {most + 1, length + 1} - {length}:
            with pytest.raises(StreamError, match=f"cannot take back {count} tokens?;"):
                rewound(state, count, session=session)
        assert rewound(state, length, session=session)[0].position == 0, "all can always be taken back"
    assert counts == set(range(1, segment + 1))


def test_padding_takes_from_what_can_be_taken_back(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """From half of a segment to a segment less one, as docs/guides/streams.md says."""
    segment = session.rule.segment
    long, found = advance(fresh, tokens[: 8 * segment]), []
    for length in range(1, segment + 1):
        state = advance(long, tokens[:length])
        padding = min(segment, 1 << (length - 1).bit_length()) - length
        found.append(most_rewound(state, session=session))
        assert found[-1] == segment - 1 - padding
        for more in range(1, padding + 1):
            state = advance(state, tokens[:1])
            assert most_rewound(state, session=session) == found[-1] + more
    assert (min(found), max(found)) == (segment // 2, segment - 1)


def test_one_token_more_would_be_wrong(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """The bound is exact: behind it a token sees what was written over."""
    text, back = tokens[:48], session.rule.segment + 1
    state = advance(fresh, text)
    state.memory.positions[0] = len(text) - back
    spoiled = StreamState(memory=state.memory, logits=None, tail=text[:0], furthest=state.furthest)
    found, expected = advance(spoiled, text[-back:][:1]), advance(fresh, text[: 1 - back])
    assert distance(found, expected) > 1e-3


def test_what_cannot_be_rewound_is_refused(
    session: Session, fresh: StreamState, advance: Advance, tokens: np.ndarray, run: Path
) -> None:
    state = advance(fresh, tokens[:5])
    for count in (-1, 6):
        with pytest.raises(StreamError, match="the stream has 5"):
            rewound(state, count, session=session)
    with pytest.raises(StreamError, match="only a ring"):
        rewound(state, 1, session=open_session(run))


def distance(one: StreamState, other: StreamState) -> float:
    """The largest difference of the log-probabilities of the next token, in nats."""
    assert one.logits is not None
    assert other.logits is not None
    log_probs = [logits - log_sum_exp(logits) for logits in (one.logits, other.logits)]
    return float(np.abs(log_probs[0] - log_probs[1]).max())
