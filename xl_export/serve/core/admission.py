"""What an engine accepts at once: tasks, and states of streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtimes.base.errors import UserError
from xl_export.serve.core.settings import EngineSettings


class QueueFullError(UserError):
    """There is no place now; the sentence and `retry_after` (seconds) say when to ask again."""

    def __init__(self, why: str, retry_after: float) -> None:
        super().__init__(f"{why}; ask again in {retry_after:.0f} seconds.")
        self.retry_after = retry_after


class StoppedError(UserError):
    """The engine stops, or has died, and admits no more tasks."""

    def __init__(self) -> None:
        super().__init__(
            "the engine of the model stops and accepts no more tasks; ask again in a moment, or ask another "
            "server."
        )


class TooManyError(UserError):
    """So much at once is never accepted, however idle the engine is."""

    def __init__(self, what: str, count: int, most: int) -> None:
        super().__init__(
            f"{count} {what} are wanted at once and this engine accepts at most {most}; ask for fewer."
        )


class Places:
    """The places for tasks and the memory for states that running requests hold. A request holds them until
    it has ended, so its later tasks always find a place. Any thread may call the methods.

    There is a place for each row, and for each task that may wait. One state of any size is always accepted.

    state_bytes: bytes of one state. retry_after: returns the seconds after which a refused client should ask
    again.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        state_bytes: int = 0,
        retry_after: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._settings = settings
        self._retry_after = retry_after
        self.most = settings.rows + settings.queue
        """Number of places."""
        self.most_states = max(1, settings.state_bytes // max(1, state_bytes))
        """Number of states that fit into the memory for them."""
        self.tasks = 0
        """Number of places held."""
        self.states = 0
        """Number of states held."""
        self._lock = threading.RLock()
        self.closed = False
        """Whether the engine stops, or has died, and nothing more is accepted."""

    def refuse(self, tasks: int = 1, states: int = 0) -> None:
        """Raises QueueFullError if these places are not free now, TooManyError if they never are, and
        StoppedError once the engine stops.
        """
        if self.closed:
            raise StoppedError
        for what, wanted, most in (("tasks", tasks, self.most), ("states", states, self.most_states)):
            if wanted > most:
                raise TooManyError(what, wanted, most)
        if self.tasks + tasks > self.most:
            waiting = self.tasks - self._settings.rows
            raise QueueFullError(
                f"{waiting:,} tasks wait already, and the queue holds {self._settings.queue:,}",
                self._retry_after(),
            )
        if self.states + states > self.most_states:
            raise QueueFullError(
                "the streams of the requests that are served fill the memory for them (--waiting-memory)",
                self._retry_after(),
            )

    @contextmanager
    def take(self, tasks: int = 1, states: int = 0) -> Iterator[None]:
        """Places for the tasks that a request has at once, and memory for their states, until the block ends.
        Raises what `refuse` raises.
        """
        with self._lock:
            self.refuse(tasks, states)
            self.tasks += tasks
            self.states += states
        try:
            yield
        finally:
            with self._lock:
                self.tasks -= tasks
                self.states -= states
