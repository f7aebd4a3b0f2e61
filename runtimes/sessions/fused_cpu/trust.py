"""Whether a library may be loaded: only if no other user but root can have written it. And how one is
written.

Loading a library executes it. The file and every folder above it must belong to this user or to root, and no
other user may write there. The folders are examined from the root downwards and without links, so no
other user can exchange a folder that was examined, or the library between this check and the moment when ONNX
Runtime loads it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from runtimes.base.files import flush


def fault(path: Path, *, folder: Path) -> str | None:
    """What is wrong with a path or with a folder above it, as a part of a sentence; None if no other user
    may write any of them.

    folder: the folder of libraries. A folder above it may be one in which only the owner of a file can
    replace it, such as /tmp.
    """
    for place in (*reversed(path.parents), path):
        try:
            facts = os.lstat(place)
        except OSError as error:
            return f"{place} cannot be examined ({error.strerror})"
        if not stat.S_ISDIR(facts.st_mode) and not (place == path and stat.S_ISREG(facts.st_mode)):
            return f"{place} is no regular file"
        if facts.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another user (number {facts.st_uid})"
        shared = facts.st_mode & stat.S_IWOTH
        if facts.st_mode & stat.S_IWGRP and (_has_access_list(place) or not _is_private_group(facts.st_gid)):
            shared |= stat.S_IWGRP
        if shared and not (place in folder.parents and facts.st_mode & stat.S_ISVTX):
            return f"other users may write {place}"
    return None


@contextlib.contextmanager
def private_file(path: Path, *, mode: int = 0o600) -> Iterator[Path]:
    """A temporary path next to `path`. What was written there takes its place when the block ends without an
    error, and only its user may write it, whatever the umask is.
    """
    import tempfile  # takes milliseconds, and sessions write no library

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        if temporary.is_file():
            temporary.chmod(mode)
            flush(temporary)  # loading a library that is cut short ends the process
            os.replace(temporary, path)


def _is_private_group(group: int) -> bool:
    """Whether a group has this user as its only member, which is the default of many systems.

    They let the group write what the user makes, such as Python's environments. Every group of this number
    then has the user's name and no other member, and it is the first group of this user only. Root
    has no such group here: system accounts may share it.

    The lists of all accounts and groups must hold the user's own. A directory service that does not list its
    accounts could hide another member, so its users and groups are never trusted.
    """
    import grp
    import pwd

    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:  # as in a container that knows no names
        return False
    groups = [entry for entry in grp.getgrall() if entry.gr_gid == group]
    first_of = {account.pw_uid for account in pwd.getpwall() if account.pw_gid == group}
    alone = all(entry.gr_name == name and set(entry.gr_mem) <= {name} for entry in groups)
    return user != 0 and bool(groups) and alone and first_of == {user}


def _has_access_list(place: Path) -> bool:
    """Whether a file or folder has an access control list.

    The group's permission bits then apply to any user that the list names, and not to the group.
    """
    if sys.platform != "linux":
        return True  # no way to ask, and no private groups by default
    try:
        return "system.posix_acl_access" in os.listxattr(place, follow_symlinks=False)
    except OSError as error:
        return error.errno != errno.ENOTSUP  # a file system without such lists
