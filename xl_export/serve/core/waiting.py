"""Tasks without a row: who is next. People come before bulk, and who was served less before who had more."""

from __future__ import annotations

from runtimes.base.errors import UserError
from xl_export.serve.core.running import Account, Running


class Busy(UserError):  # noqa: N818
    """The queue is full; the sentence and `retry_after` (seconds) say when to ask again."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} tasks wait already, which is the most that this engine takes; ask again in "
            f"{retry_after:.0f} seconds."
        )
        self.retry_after = retry_after


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
