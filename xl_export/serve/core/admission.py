"""How many tasks an engine accepts at once, and how many states of streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtimes.base.errors import UserError
from xl_export.serve.core.settings import EngineSettings


class Busy(UserError):  # noqa: N818
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
    """What the requests that are served hold of an engine: places for their tasks, and memory for the states
    of streams. A request holds them until it has ended, so its later tasks always find a place. Its methods
    may be called on any thread.

    There are as many places as rows and places in the queue. One state of any size is always accepted.

    state_bytes: of one state. retry_after: seconds after which a client that finds no place should ask again.
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
        #: The most tasks at once.
        self.most = settings.rows + settings.queue
        #: The most states at once.
        self.most_states = max(1, settings.state_bytes // max(1, state_bytes))
        #: Tasks of the requests that are served.
        self.tasks = 0
        #: Their states.
        self.states = 0
        self._lock = threading.RLock()
        #: Whether the engine stops, or has died, and nothing more is accepted.
        self.closed = False

    def refuse(self, tasks: int = 1, states: int = 0) -> None:
        """Raises Busy if there are not so many places now, TooManyError if there never are, and StoppedError
        once the engine stops.
        """
        if self.closed:
            raise StoppedError
        for what, wanted, most in (("tasks", tasks, self.most), ("states", states, self.most_states)):
            if wanted > most:
                raise TooManyError(what, wanted, most)
        if self.tasks + tasks > self.most:
            waiting = self.tasks - self._settings.rows
            raise Busy(
                f"{waiting:,} tasks wait already, and the queue holds {self._settings.queue:,}",
                self._retry_after(),
            )
        if self.states + states > self.most_states:
            raise Busy(
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
