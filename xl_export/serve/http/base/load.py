"""How many requests, or WebSockets, there are at once, so that nobody takes the places of everybody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from xl_export.serve.http.base.errors import RefusedError


class Load:
    """Counts what there is now. what: its name in messages. total: of all tenants together."""

    def __init__(self, what: str) -> None:
        self._what, self.total = what, 0
        self._own: Counter[str] = Counter()

    @contextmanager
    def one(self, tenant: str, most: int, share: float) -> Iterator[None]:
        """While the block runs, there is one more. Raises RefusedError where there are `most`, or where a
        tenant with a name has its share of them.
        """
        own = max(1, int(most * share))
        if self.total >= most:
            raise self._full(f"the server has {self.total:,}")
        if tenant and self._own[tenant] >= own:
            raise self._full(f"the tenant has {own:,}")
        self.total += 1
        self._own[tenant] += 1
        try:
            yield
        finally:
            self.total -= 1
            self._own[tenant] -= 1
            if not self._own[tenant]:
                del self._own[tenant]

    def _full(self, who: str) -> RefusedError:
        return RefusedError(
            f"{who} {self._what} at once and may have no more; ask again when one of them has ended.",
            status=429,
            code="too_many",
            retry_after=1,
        )
