"""How many operations may hold a state that is not on the disk yet."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from xl_export.serve.streams.facts import FullStoreError

SHARE = 0.5  # of the operations, that one tenant with a name may have, so that the others are not kept out


class Unwritten:
    """Counts the operations that give a stream a new state, each from before its first work until that state
    is on the disk. So a disk that is slower than the model cannot fill the memory with finished states.
    """

    def __init__(self, max_bytes: int, *, row_bytes: int) -> None:
        """row_bytes: of one state. One operation is always let in."""
        self._most, self._own = max(1, max_bytes // max(row_bytes, 1)), Counter[str]()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self, tenant: str = "") -> Iterator[None]:
        """While the block runs, the tenant has one operation more.

        Raises FullStoreError where there are too many, or where a tenant with a name has its share of them.
        """
        with self._lock:
            running, own = self._own.total(), self._own[tenant]
            if running >= self._most:
                raise self._full(f"{running:,} operations on streams")
            if tenant and own >= max(1, int(SHARE * self._most)):
                raise self._full(f"{own:,} operations of this tenant on streams")
            self._own[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._own[tenant] -= 1
                if not self._own[tenant]:
                    del self._own[tenant]

    def _full(self, what: str) -> FullStoreError:
        return FullStoreError(
            f"{what} run or wait for the disk, as many as this server has memory for (--waiting-memory); "
            "send the request again after the seconds of Retry-After."
        )
