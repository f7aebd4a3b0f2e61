"""A stream is rewound exactly, or it is said how far it can be rewound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.errors import StreamError
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from tests.xl_export.serve.core.driver import Driver
from xl_export.serve.core.state import StreamState, rewound
from xl_export.serve.core.task import Drawing, Task

GREEDY = Drawing(max_tokens=12, sampler=Sampler(temperature=0))


def fed(driver: Driver, tokens: np.ndarray, state: StreamState | None = None) -> StreamState:
    driver.run(task := Task(tokens=tokens, state=state, keep=True))
    return driver.ended(task).state


def goes_on(driver: Driver, tokens: np.ndarray, state: StreamState | None) -> tuple[np.ndarray, list[int]]:
    driver.run(task := Task(tokens=tokens, state=state, drawing=GREEDY, keep=True))
    return driver.ended(task).state.logits, driver.tokens(task)


@pytest.mark.parametrize(("length", "last"), [(40, 8), (43, 3), (45, 5), (3, 3)])
def test_a_stream_goes_on_from_any_place_to_which_it_can_be_rewound(
    length: int, last: int, session: Session
) -> None:
    """last: tokens of the last piece. Its padding takes of the segment that a stream can go back."""
    driver = Driver(session, rows=2)
    text = np.random.default_rng(length).integers(session.vocab.size, size=length + 1)[:length]
    state = fed(driver, text)
    width = 1 << (last - 1).bit_length()
    most = min(session.rule.segment - (width - last) - 1, length - 1)
    assert state.written == length - last + width
    for count in (0, 1, most):
        back, again = rewound(state, count, session=session)
        assert (back.position, again.tolist()) == (length - count - 1, [text[length - count - 1]])
        assert (back.logits, state.position) == (None, length)
        logits, drawn = goes_on(driver, again, back)
        expected, tokens = goes_on(driver, text[: length - count], None)
        assert drawn == tokens
        assert np.abs(logits - expected).max() < 1e-4
    once = fed(driver, *rewound(state, 1, session=session)[::-1])
    assert (once.position, once.written) == (length - 1, state.written)
    if most < length - 1:
        with pytest.raises(StreamError, match=rf"holds what at most {most} of them saw"):
            rewound(state, most + 1, session=session)
        with pytest.raises(StreamError, match=rf"holds what at most {most - 1} of them saw"):
            rewound(once, most, session=session)


def test_one_token_more_would_be_wrong(session: Session) -> None:
    """The bound is exact: behind it a token sees what was written over."""
    driver = Driver(session, rows=1)
    text = np.random.default_rng(1).integers(session.vocab.size, size=48)
    state, back = fed(driver, text), session.rule.segment + 1
    state.memory.positions[0] = len(text) - back
    spoiled = StreamState(memory=state.memory, logits=None, tail=text[:0], written=state.written)
    found, expected = fed(driver, text[-back:][:1], spoiled), fed(driver, text[: 1 - back])
    assert np.abs(found.logits - expected.logits).max() > 1e-3


def test_the_start_of_a_stream_is_always_reached(session: Session) -> None:
    driver = Driver(session, rows=1)
    state = fed(driver, np.arange(50) % session.vocab.size)
    start, nothing = rewound(state, 50, session=session)
    assert (start.position, start.written, len(start.tail), len(nothing)) == (0, 0, 0, 0)
    text = np.arange(9)
    logits, drawn = goes_on(driver, text, start)
    expected, tokens = goes_on(driver, text, None)
    assert np.array_equal(logits, expected)
    assert drawn == tokens


def test_what_cannot_be_rewound_is_refused(session: Session, run: Path) -> None:
    state = fed(Driver(session, rows=1), np.arange(5))
    for count in (-1, 6):
        with pytest.raises(StreamError, match="expected 0 to 5, all of the stream"):
            rewound(state, count, session=session)
    with pytest.raises(StreamError, match="export it with `--memory ring`"):
        rewound(state, 1, session=open_session(run))
