"""Which tasks an engine admits: places in its queue, and memory for the states of tasks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runtimes.base.errors import UserError
from xl_export.serve.core.task import Task

NO_BYTES = "the streams of the tasks that wait fill the memory that is kept for them"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sizes of an engine, all at least 1."""

    #: R, how many streams advance at once.
    rows: int = 32
    #: The most tasks that wait for a row; more are refused before any work, and bulk and single tenants may
    #: have a part of it (see `Admission`).
    queue: int = 1024
    #: The most tokens of prompts that are fed in one iteration, padding included; at least one piece is
    #: always fed.
    prompt_tokens: int = 128
    #: After so many answers that its client has not accepted, a task pauses and gives its row to others.
    unread: int = 256
    #: The most bytes of the states with which tasks begin; likewise of the rows that were copied because a
    #: client accepts no answers (half of them for one tenant), and of those that were preempted. One state or
    #: copy is always admitted.
    state_bytes: int = 4 << 30


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
    """So many tasks at once are never admitted, however idle the engine is."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(
            f"{count} tasks are wanted at once and this engine accepts at most {most}; ask for fewer."
        )


class Quota:
    """Counts things that all tenants share. A tenant with a name may have only a part of them, so that it
    does not shut out the others. Its methods may be called on any thread.

    refusal: makes the error of `one` from how many there are, and whether these are the tenant's own.
    """

    def __init__(
        self, most: int, *, share: float = 0.5, refusal: Callable[[int, bool], Exception] | None = None
    ) -> None:
        #: Of all tenants together.
        self.most = most
        #: How many there are.
        self.total = 0
        self._share = share
        self._refusal = refusal
        self._own: Counter[str] = Counter()
        self._lock = threading.RLock()

    def has_room(self, tenant: str, count: int = 1) -> bool:
        """Whether the tenant may have so many more."""
        most_of_one = max(1, int(self.most * self._share))
        own = self._own[tenant] + count
        return self.total + count <= self.most and (not tenant or own <= most_of_one)

    def add(self, tenant: str, count: int = 1) -> None:
        """The tenant has so many more, or fewer."""
        with self._lock:
            self.total += count
            self._own[tenant] += count
            if not self._own[tenant]:
                del self._own[tenant]

    @contextmanager
    def one(self, tenant: str = "") -> Iterator[None]:
        """While the block runs, the tenant has one more. Raises the refusal if it may not have it."""
        with self._lock:
            if not self.has_room(tenant):
                assert self._refusal is not None
                of_tenant = self.total < self.most
                raise self._refusal(self._own[tenant] if of_tenant else self.total, of_tenant)
            self.add(tenant)
        try:
            yield
        finally:
            self.add(tenant, -1)


class Admission:
    """Counts the tasks that an engine has admitted, by tenant and class, and the bytes of their states.

    There are as many places as rows and places in the queue. Of those beyond the rows, bulk may have half,
    and a tenant with a name may have as many as it leaves free to others, but at least one: so neither bulk
    nor one tenant shuts out all others. The bytes of the states with which tasks begin are bounded, too;
    one state of any size is admitted. Its methods may be called on any thread.

    state_bytes: of one state. paused: the tasks that wait for their clients, which need no place.
    retry_after: seconds after which a client that finds no place should ask again.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        state_bytes: int = 0,
        paused: Callable[[], Collection[Task]] = tuple,
        retry_after: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._settings = settings
        self._state_bytes = state_bytes
        self._paused = paused
        self._retry_after = retry_after
        self._places: Counter[tuple[str, bool]] = Counter()
        self._bytes = 0
        self._lock = threading.RLock()
        #: Whether the engine stops, or has died, and nothing more is admitted.
        self.closed = False

    def reserve(self, tasks: int, tenant: str = "", *, bulk: bool = False, states: int = 0) -> Reservation:
        """Reserves places for tasks of one tenant and class, and memory for states that a request will make
        and keep: `Engine.submit` then succeeds under any load. Raises as `refuse`, Busy if there is not so
        much memory now, and UserError if there never is.
        """
        settings = self._settings
        num_bytes = states * self._state_bytes
        if states > 1 and num_bytes > settings.state_bytes:
            raise UserError(
                f"{states} prompts with several choices keep {self._state_bytes:,} bytes each, and there are "
                f"{settings.state_bytes:,} bytes for all; send fewer prompts at once."
            )
        with self._lock:
            self.refuse(tasks, tenant, bulk=bulk)
            if states:
                self._add_bytes(num_bytes)
            self._places[tenant, bulk] += tasks
        return Reservation(self, tenant, bulk, places=tasks, num_bytes=num_bytes)

    def refuse(self, count: int, tenant: str = "", *, bulk: bool = False) -> None:
        """Raises Busy if there are not so many places now, TooManyError if there never are, and StoppedError
        once the engine stops.
        """
        if self.closed:
            raise StoppedError
        rows = self._settings.rows
        queue = self._settings.queue
        most = queue // 2 if bulk else queue
        ever = rows + (min(most, max(1, most // 2)) if tenant else most)
        if count > ever:
            raise TooManyError(count, ever)
        with self._lock:
            places = +self._places
        if places.total() + count <= rows:
            return
        places -= Counter((task.tenant, task.bulk) for task in self._paused())
        waiting = max(0, places.total() + count - rows)
        alike = waiting
        if bulk:
            alike = min(waiting, sum(n for (_, each), n in places.items() if each) + count)
        own = min(waiting, places[tenant, bulk] + count)
        if waiting > queue:
            why = f"{waiting - count} tasks wait already, and the queue holds {queue}"
        elif alike > most:
            why = f"bulk may have {most} places of the queue, and they are taken"
        elif tenant and own > max(1, most - alike):
            why = f"the tenant has its share of the queue, {places[tenant, bulk]} tasks"
        else:
            return
        raise Busy(why, self._retry_after())

    def admit(self, task: Task, reserved: Reservation | None = None) -> Reservation:
        """The place of a task until its end, and the memory of the state with which it begins.

        reserved: provides the place if it has one left, and covers the state if it is for states. Raises as
        `reserve`.
        """
        with self._lock:
            transferred = reserved is not None and reserved.places > 0
            if not transferred:
                self.refuse(1, task.tenant, bulk=task.bulk)
            num_bytes = 0
            if task.state is not None and not (reserved is not None and reserved.num_bytes):
                num_bytes = task.state.num_bytes
                self._add_bytes(num_bytes)
            if transferred and reserved is not None:
                assert (reserved.tenant, reserved.bulk) == (task.tenant, task.bulk), "a place of another kind"
                reserved.places -= 1
            else:
                self._places[task.tenant, task.bulk] += 1
        return Reservation(self, task.tenant, task.bulk, places=1, num_bytes=num_bytes)

    def _add_bytes(self, num_bytes: int) -> None:
        """Counts bytes of states; raises Busy if they are too many. The caller has the lock."""
        if self._bytes and self._bytes + num_bytes > self._settings.state_bytes:
            raise Busy(NO_BYTES, self._retry_after())
        self._bytes += num_bytes


class Reservation:
    """Places for tasks of one tenant and class, and memory for states, until it is released. Leaving its
    `with` block releases it, and a second time changes nothing.
    """

    def __init__(
        self, admission: Admission, tenant: str, bulk: bool, *, places: int, num_bytes: int = 0
    ) -> None:
        self._admission = admission
        self.tenant = tenant
        self.bulk = bulk
        #: Places that no task has yet.
        self.places = places
        #: Memory for states that are still to be made, or for the state with which a task begins.
        self.num_bytes = num_bytes

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives back what is left."""
        admission = self._admission
        with admission._lock:
            admission._places[self.tenant, self.bulk] -= self.places
            admission._places += Counter()  # forgets kinds without a place
            admission._bytes -= self.num_bytes
            self.places = 0
            self.num_bytes = 0
