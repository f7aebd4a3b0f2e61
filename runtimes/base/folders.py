"""Folders that are whole or absent: everything is made under a hidden name and renamed into place at the end.

A kill at any moment leaves either the old folder or the new one under the requested name. What it leaves
under the hidden name is removed by the next command that writes to the same place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import flush, reading, writing
from runtimes.base.kinds import DATA, KINDS, Kind
from runtimes.base.partial import bring_back, make_hidden, retired_name, sweep

# Arguments of Linux's renameat2.
AT_FDCWD = -100
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def atomic_folder(
    path: Path, kind: Kind, *, force: bool = False, sources: Sequence[Path] = ()
) -> Iterator[Path]:
    """A temporary folder next to `path` that takes its place when the block ends without an error.

    An existing `path` is refused unless it is empty, or `force` is set and it holds only files of such a
    folder. That is checked again just before it is replaced, because another process may have added a file
    meanwhile. sources: what the new folder is made from, which must not be in the folder that is replaced.
    Raises UserError; `path` is then as it was.
    """
    import shutil  # takes milliseconds, and a session writes no folder

    refuse_existing(path, kind, force=force, sources=sources)
    path = path.resolve()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        bring_back(path)
        sweep(path)
        temporary, lock = make_hidden(path, folder=True)
        try:
            yield temporary
            # The next `force` would refuse a folder with a file that is not on the list.
            assert not (foreign := kind.foreign(temporary)), f"{foreign} are no files of {kind.what}"
            for file in temporary.rglob("*"):
                if file.is_file():
                    flush(file)
            if force:
                _exchange(temporary, path, kind, sources=sources)
            else:
                _move_onto_nothing(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)


def refuse_no_folder(path: Path, *, give: str) -> None:
    """Raises ArtefactError if `path` is not a folder. Call it before a message says what the folder lacks.

    give: what was expected, for the message.
    """
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise ArtefactError(f"{path} {found}; give {give}.")


def refuse_dataset(path: Path, *, give: str) -> None:
    """Raises ArtefactError if `path` is a prepared dataset. give: what was expected, for the message."""
    if (path / DATA).is_file():
        raise ArtefactError(
            f"{path} is a dataset; give {give}, or train a model on it with `xl-export train --data {path}`."
        )


def refuse_existing(path: Path, kind: Kind, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Raises UserError when `path` exists and may not be replaced, or when it is inside a folder of ours."""
    refuse_place(path)
    whole = path.resolve()
    with reading(path):
        empty = not path.exists() or not any(path.iterdir())
        foreign = [] if empty else kind.foreign(path)
    if foreign and (missing := kind.lacks(path)):
        raise UserError(
            f"{path} holds other things than {kind.what} ({_two(foreign)}, and no {missing}); give another "
            "--out."
        )
    if foreign:
        raise UserError(
            f"{path} also holds {_two(foreign)}, which this command did not write and would delete; move "
            "them elsewhere first, or give another --out."
        )
    for source in sources:
        if source.exists() and source.resolve().is_relative_to(whole):
            raise UserError(
                f"{source} lies in {path}, which would be replaced and deleted; give another --out, "
                "or move it elsewhere first."
            )
    if _working_folder().is_relative_to(whole):  # an empty one would be exchanged, too
        raise UserError(
            f"{path} is the folder that this command was started in, or contains it, and would be replaced; "
            "start the command elsewhere, or give another --out."
        )
    if not force and not empty:
        raise UserError(
            f"{path} exists already; give another --out, or --force (force=True in Python) to replace it."
        )


def _two(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return " and ".join(f"{name!r:.80}" for name in names[:2]) + more


def refuse_place(path: Path) -> None:
    """Raises UserError if no folder can be made at `path`, or one of ours would contain it."""
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"{place} is a file, not a folder; give another --out.")
            break
    refuse_inside(path, give="an --out")


def refuse_inside(path: Path, *, give: str) -> None:
    """Raises UserError if a folder of ours contains `path`. give: what was expected, for the message."""
    for place in path.resolve().parents:
        for kind in KINDS:
            if not kind.lacks(place):
                raise UserError(
                    f"{path} is inside of {place}, which is {kind.what}; give {give} outside of it."
                )


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was deleted
        return Path("/")


def _move_onto_nothing(temporary: Path, path: Path) -> None:
    """Renames onto what is absent or an empty folder: the operating system refuses anything else."""
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(
            f"{path} was written by somebody else meanwhile, and is left as it is; give another --out, "
            "or --force to replace it."
        ) from error


def _exchange(temporary: Path, path: Path, kind: Kind, *, sources: Sequence[Path]) -> None:
    """Puts the new folder in place of the old one, which ends up under the temporary name."""
    refuse_existing(path, kind, force=True, sources=sources)
    if not path.exists():
        _move_onto_nothing(temporary, path)
        return
    with _locked(path):  # it must not be swept under its hidden name either before it was checked
        _exchange_existing(temporary, path, kind)


def _exchange_existing(temporary: Path, path: Path, kind: Kind) -> None:
    if _swap(temporary, path):
        try:  # what was there at that very moment must be what may be deleted
            refuse_existing(temporary, kind, force=True)
        except UserError as error:
            _swap(temporary, path)
            raise UserError(f"{path} changed meanwhile, and is left as it is; give another --out.") from error
        return
    # Two renames, because the system has no exchange. A kill between them leaves the old folder under a name
    # from which the next command restores it.
    retired = retired_name(path)
    os.rename(path, retired)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(retired, path)
        raise
    os.rename(retired, temporary)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock on a folder that shows `sweep` what is in use, if the file system has locks."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _swap(first: Path, second: Path) -> bool:
    """Exchanges two names at once, so that neither is ever missing; False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # the file system knows no exchange
        return False
    raise OSError(number, os.strerror(number), str(second))
