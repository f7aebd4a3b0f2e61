"""A folder that one process at a time may write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from runtimes.base.errors import UserError
from runtimes.base.files import writing

LOCK = ".writer"  # in the folder: who writes to it, for people; the lock itself is the operating system's
HOLDER_BYTES = 200


@contextlib.contextmanager
def only_writer(folder: Path, *, doing: str) -> Iterator[None]:
    """While the block runs, every other process that asks for the same folder is refused.

    doing: what this process does there, for the error message of the others. The operating system releases
    the lock when this process ends, however it ends. Raises UserError that names the process that holds it.
    """
    lock = _take(folder)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.truncate(lock, 0)
        os.pwrite(
            lock, f"{doing} by process {os.getpid()} on {os.uname().nodename} since {since}".encode(), 0
        )
        yield
    finally:
        # The file is removed before the lock, so that the next owner of the lock sees that it is gone. If the
        # folder was exchanged meanwhile, the file of that name belongs to another process.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                (folder / LOCK).unlink()
        os.close(lock)


def _take(folder: Path) -> int:
    """The descriptor of the lock file, locked."""
    while True:
        with writing(folder):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, HOLDER_BYTES, 0).decode("utf-8", "replace")
            os.close(lock)
            by = f" ({holder})" if holder and holder.isprintable() else ""
            raise UserError(
                f"{folder} is being written by another process{by}; wait until that one ends, or stop it."
            ) from None
        except OSError:  # a file system without locks: there is nothing to hold
            return lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                return lock
        os.close(lock)  # the process before had it and has just removed the file
