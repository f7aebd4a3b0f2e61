"""What an engine accepts at once: tasks, and states of streams."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from xl_export.serve.core.admission import Places, QueueFullError, StoppedError, TooManyError
from xl_export.serve.core.settings import EngineSettings


def test_rows_and_queue_are_places_until_a_request_has_ended() -> None:
    places = Places(EngineSettings(rows=2, queue=3), retry_after=lambda: 7.0)
    with places.take(4):
        places.refuse()
        with pytest.raises(
            QueueFullError, match=r"2 tasks wait already, and the queue holds 3; .* 7 seconds"
        ) as busy:
            places.refuse(2)
        assert busy.value.retry_after == 7
        with places.take(), pytest.raises(QueueFullError), places.take():
            pass
        places.refuse()
    assert (places.tasks, places.states) == (0, 0)
    with pytest.raises(TooManyError, match="6 tasks are wanted at once and this engine accepts at most 5"):
        places.refuse(6)


def test_states_have_so_many_bytes_and_one_always_fits() -> None:
    places = Places(EngineSettings(state_bytes=99), state_bytes=33)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(places.take(states=1))
        with pytest.raises(QueueFullError, match="--waiting-memory"):
            places.refuse(states=1)
        places.refuse()
    with pytest.raises(TooManyError, match="4 states are wanted"):
        places.refuse(states=4)
    places = Places(EngineSettings(state_bytes=1), state_bytes=33)
    with places.take(states=1), pytest.raises(QueueFullError):
        places.refuse(states=1)


def test_a_stopped_engine_accepts_nothing() -> None:
    places = Places(EngineSettings())
    places.closed = True
    with pytest.raises(StoppedError):
        places.refuse()
