"""How many operations may hold a state that is not on the disk yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from xl_export.serve.streams.facts import FullStoreError


class Unwritten:
    """Counts the operations that give a stream a new state, each from before its first work until that state
    is on the disk. So a disk that is slower than the model cannot fill the memory with finished states.
    """

    def __init__(self, max_bytes: int, *, row_bytes: int) -> None:
        """row_bytes: of one state. One operation is always let in."""
        self._most, self._count = max(1, max_bytes // max(row_bytes, 1)), 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """While the block runs, one operation more is counted; raises FullStoreError where it is too many."""
        with self._lock:
            if self._count >= self._most:
                raise FullStoreError(
                    f"{self._count:,} operations on streams run or wait for the disk, as many as this server "
                    "has memory for (--waiting-memory); send the request again after the seconds of "
                    "Retry-After."
                )
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
