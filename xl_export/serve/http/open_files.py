"""How many files and sockets the process may have open, and so how many connections it can take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xl_export.serve.http.base.limits import Limits

try:
    import resource as _resource
except ImportError:  # no POSIX
    _resource = None  # type: ignore[assignment]

resource: Any = _resource
RESERVE = 256  # for artefacts, streams and their journals, and libraries; at most half of all
EACH = 2  # of a connection: its socket, and the file of a snapshot that is sent or received over it


def raised(wanted: int) -> int:
    """How many files the process may have open, after its soft limit was raised to as many as are wanted, but
    not beyond its hard limit.
    """
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if target <= soft:
        return int(soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # a system that allows less than it says
        return int(soft)
    return int(target)


def fitted(limits: Limits) -> tuple[Limits, int]:
    """The limits with no more connections than the process can have files for, and the number of files. Half
    of fewer connections may be WebSockets, so that these never shut out requests.
    """
    files = raised(EACH * limits.connections + RESERVE)
    connections = max(1, (files - min(RESERVE, files // 2)) // EACH)
    if connections >= limits.connections:
        return limits, files
    sockets = max(1, min(limits.sockets, connections // 2))
    return replace(limits, connections=connections, sockets=sockets), files
