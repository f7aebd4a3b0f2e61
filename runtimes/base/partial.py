"""Hidden names for what is being written, next to its final place.

The writer holds a lock on the hidden file or folder. So a later command can distinguish what a killed one
left behind, which is not locked, from what another process is writing now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path


def hidden_name(path: Path) -> Path:
    """A new hidden name in the folder of `path`; `sweep` knows it again."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


def retired_name(path: Path) -> Path:
    """A hidden name for what `path` was, while it is replaced in two steps; `bring_back` knows it again."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.replaced")


def destination(hidden: str) -> str | None:
    """The name for which `hidden_name` made this one; None for any other name."""
    found = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.partial", hidden)
    return found[1] if found else None


def bring_back(path: Path) -> None:
    """Restores the old folder at `path` if a kill between two renames left it only under a hidden name."""
    if path.exists():
        return
    for entry in list(os.scandir(path.parent)):
        if re.fullmatch(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.replaced", entry.name):
            os.rename(entry.path, path)
            return


def make_hidden(path: Path, *, folder: bool) -> tuple[Path, int]:
    """Makes an empty hidden file or folder next to `path`.

    Returns it, and the descriptor that holds its lock until it is closed. An interruption leaves nothing
    behind.
    """
    while True:
        hidden = hidden_name(path)
        try:
            lock = _made_and_locked(hidden, folder=folder)
        except FileExistsError:  # it belongs to another process, so it is not removed
            continue
        except BaseException:  # a signal may come between any two calls
            with contextlib.suppress(OSError):
                hidden.rmdir() if folder else hidden.unlink()
            raise
        if lock is not None:
            return hidden, lock


def _made_and_locked(hidden: Path, *, folder: bool) -> int | None:
    """The descriptor of a new file or folder, locked; None if a sweeper was quicker."""
    if folder:
        hidden.mkdir()
        try:
            lock = os.open(hidden, os.O_RDONLY)
        except FileNotFoundError:
            return None
    else:
        lock = os.open(hidden, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # the sweeper came between the two calls, and removes it
        os.close(lock)
        return None
    except OSError:  # a file system without locks: nothing is swept
        return lock
    if hidden.exists():
        return lock
    os.close(lock)
    return None


def sweep(path: Path) -> None:
    """Removes what killed commands left next to `path`: hidden names made for it that are not locked."""
    left = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):  # a folder that cannot be listed keeps what is in it
        for entry in list(os.scandir(path.parent)):
            if left.fullmatch(entry.name) and not entry.is_symlink():
                _remove_unlocked(Path(entry.path), folder=entry.is_dir())


def _remove_unlocked(hidden: Path, *, folder: bool) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(hidden, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder:
                import shutil  # takes milliseconds, and only a write that was cut short leaves a folder

                shutil.rmtree(hidden, ignore_errors=True)
            else:
                hidden.unlink()
        finally:
            os.close(lock)
