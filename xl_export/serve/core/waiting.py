"""Who is let in, and of the tasks without a row who is next.

People come before bulk, and who was served less before who had more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence

from runtimes.base.errors import UserError
from xl_export.serve.core.running import Account, Running
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Task

TURN = 512  # tokens that one tenant may be ahead of another who waits


class Busy(UserError):  # noqa: N818
    """There is no place now; the sentence and `retry_after` (seconds) say when to ask again."""

    def __init__(self, why: str, retry_after: float) -> None:
        super().__init__(f"{why}; ask again in {retry_after:.0f} seconds.")
        self.retry_after = retry_after


class StoppedError(UserError):
    """The engine stops, or has died, and takes no more tasks."""

    def __init__(self) -> None:
        super().__init__(
            "the engine of the model stops and takes no more tasks; ask again in a moment, or ask another "
            "server."
        )


class TooManyError(UserError):
    """So many tasks at once are never let in, however idle the engine is. most: how many are."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(
            f"{count} tasks are wanted at once and this engine takes at most {most}; ask for fewer."
        )
        self.most = most


class Door:
    """Counts the tasks that an engine has taken and the places that are reserved, by tenant and class.

    There are as many places as rows and places in the queue. Of those beyond the rows, bulk may have half,
    and a tenant with a name may have as many as it leaves free to others, but at least one: so neither bulk
    nor one tenant shuts out everybody else. The bytes of the states that tasks bring are counted, too; one
    state is let in whatever its size. Its methods may be called on any thread.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._rows, self._queue, self._state_bytes = settings.rows, settings.queue, settings.state_bytes
        self._taken: Counter[tuple[str, bool]] = Counter()
        self._states: dict[int, int] = {}  # how many tasks brought the state of this id
        self._bytes = 0
        self._lock = threading.Lock()

    def why_not(
        self, count: int, tenant: str, bulk: bool, *, paused: Collection[Task] = (), take: bool = False
    ) -> str:
        """Why there are not so many places now; empty where there are, and then they are taken if wanted.

        paused: the tasks that wait for their clients, which need no place. Raises TooManyError for more
        places than there ever are.
        """
        most = self._queue // 2 if bulk else self._queue
        ever = self._rows + (min(most, max(1, most // 2)) if tenant else most)
        if count > ever:
            raise TooManyError(count, ever)
        kind = (tenant, bulk)
        with self._lock:
            taken = self._taken - Counter((task.tenant, task.bulk) for task in paused)
            total = taken.total() + count
            waiting = max(0, total - self._rows)
            alike = (
                min(waiting, sum(n for (_, each), n in taken.items() if each) + count) if bulk else waiting
            )
            own = min(waiting, taken[kind] + count)
            if waiting > self._queue:
                return f"{waiting - count} tasks wait already, and this engine takes {self._queue}"
            if alike > most:
                return f"bulk may have {most} places of the queue, and they are taken"
            if tenant and own > max(1, most - alike):
                return f"the tenant has its share of the queue, {taken[kind]} tasks"
            if take:
                self._taken[kind] += count
            return ""

    def leave(self, count: int, tenant: str, bulk: bool) -> None:
        """Gives places back."""
        with self._lock:
            self._taken[tenant, bulk] -= count
            if not self._taken[tenant, bulk]:
                del self._taken[tenant, bulk]

    def bring(self, state: StreamState) -> bool:
        """Counts a state that a task brings, unless that would be too many bytes; a state that several tasks
        bring is counted once.
        """
        with self._lock:
            uses = self._states.get(id(state), 0)
            if not uses and not self._fits(state.num_bytes):
                return False
            self._states[id(state)] = uses + 1
            self._bytes += 0 if uses else state.num_bytes
            return True

    def drop(self, state: StreamState) -> None:
        """Notes that a task has ended that brought this state."""
        with self._lock:
            self._states[id(state)] -= 1
            if not self._states[id(state)]:
                del self._states[id(state)]
                self._bytes -= state.num_bytes

    def hold(self, num_bytes: int) -> bool:
        """Counts bytes of states that are still to be made, unless that would be too many."""
        with self._lock:
            if not self._fits(num_bytes):
                return False
            self._bytes += num_bytes
            return True

    def let_go(self, num_bytes: int) -> None:
        """Notes that states whose bytes `hold` has counted are gone."""
        with self._lock:
            self._bytes -= num_bytes

    def _fits(self, num_bytes: int) -> bool:
        return not self._bytes or self._bytes + num_bytes <= self._state_bytes


class Places:
    """Places that are reserved for tasks of one tenant and class. Leaving its `with` block gives back those
    that no task has used.
    """

    def __init__(self, door: Door, count: int, tenant: str, bulk: bool) -> None:
        self._door, self._left, self._tenant, self._bulk = door, count, tenant, bulk
        self._lock = threading.Lock()

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def use(self, task: Task) -> None:
        """Takes one of the places for a task, which gives it back at its end."""
        with self._lock:
            if not self._left or (task.tenant, task.bulk) != (self._tenant, self._bulk):
                raise UserError("no place is reserved for this task; reserve one for each task.")
            self._left -= 1

    def release(self) -> None:
        """Gives back the places that were not used."""
        with self._lock:
            left, self._left = self._left, 0
        if left:
            self._door.leave(left, self._tenant, self._bulk)


class Held:
    """Memory for states that a request keeps between its tasks. `release` gives it back, once."""

    def __init__(self, door: Door, num_bytes: int) -> None:
        self._door, self._bytes = door, num_bytes

    def release(self) -> None:
        """Notes that the states are gone."""
        num_bytes, self._bytes = self._bytes, 0
        self._door.let_go(num_bytes)


class Waiting:
    """The tasks of all tenants that wait for a row."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._counts = {False: 0, True: 0}

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    def has(self, *, bulk: bool) -> bool:
        """Whether a task of this class waits."""
        return self._counts[bulk] > 0

    def enter(self, run: Running) -> None:
        """Puts a new run at the end of its tenant's queue."""
        tenant = run.task.tenant
        account = self._accounts.get(tenant)
        if account is None:
            served = min((each.served for each in self._accounts.values()), default=0.0)
            account = self._accounts[tenant] = Account(tenant, served)
        account.tasks += 1
        run.account = account
        self.add(run)

    def leave(self, run: Running) -> None:
        """Notes that a run has ended, which does not wait; a tenant without any is forgotten."""
        run.account.tasks -= 1
        if not run.account.tasks:
            del self._accounts[run.account.tenant]

    def add(self, run: Running, *, first: bool = False) -> None:
        """Puts a run at the end of its tenant's queue, or in front of it."""
        queue = run.account.queue(run.task.bulk)
        (queue.appendleft if first else queue.append)(run)
        self._counts[run.task.bulk] += 1

    def remove(self, run: Running) -> None:
        """Takes out a run that will not be served."""
        run.account.queue(run.task.bulk).remove(run)
        self._counts[run.task.bulk] -= 1

    def next(self, *, bulk: bool) -> Account | None:
        """Of the tenants with waiting tasks one without a row, then the one who was served least."""
        waits = [account for account in self._accounts.values() if account.queue(bulk)]
        return min(waits, key=lambda a: (a.rows > 0, a.served, a.queue(bulk)[0].order), default=None)

    def take(self) -> Running:
        """The run that gets the next row, of those that wait; it waits no longer."""
        bulk = not self._counts[False]
        account = self.next(bulk=bulk)
        assert account is not None, "nobody waits"
        self._counts[bulk] -= 1
        return account.queue(bulk).popleft()

    def victim(self, holders: Sequence[Running]) -> Running | None:
        """Of the runs that have rows the one that gives its row to one that waits; None where nobody has to.

        Bulk gives way to people. Of tenants, who has several rows gives one to who has none, and who is a
        turn ahead gives one to who has fewer.
        """
        bulk = not self.has(bulk=False)
        # A run that is closing leaves its row with the next step anyway.
        holders = [run for run in holders if run.task.bulk >= bulk and run.closing is None]
        if not bulk and (rows := [run for run in holders if run.task.bulk]):
            return max(rows, key=lambda run: (run.account.served, run.order))
        waits = self.next(bulk=bulk)
        others = [run for run in holders if run.account is not waits]
        if waits is None or not others:
            return None
        most = max((run.account for run in others), key=lambda account: (account.rows, account.served))
        ahead = waits.served + TURN <= most.served and most.rows > waits.rows
        if not (ahead or (waits.rows == 0 and most.rows > 1)):
            return None
        return min((run for run in others if run.account is most), key=lambda run: run.since)
