"""What a container may use: the limits of Linux control groups, versions 1 and 2.

A container sees the processors and the memory of its host, and is stopped or slowed down when it uses more
than its group may. Every group above counts too, as far up as this process can see. Sets of processors
(cpusets) need nothing here: `os.sched_getaffinity` knows them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_limit(root: Path = ROOT) -> int | None:
    """Returns how many processors this process may use, rounded up; None if there is no limit.

    root: where `proc` and `sys` are.
    """
    limits = [_share(folder) for folder in _groups("cpu", root)]
    return max(1, math.ceil(min(found))) if (found := [limit for limit in limits if limit]) else None


@functools.cache  # each new memory of a session asks, and there may be a hundred mounts to read
def memory_limit(root: Path = ROOT) -> int | None:
    """The bytes of memory that this process may use, read once; None if there is no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [_number(folder / name) for folder in _groups("memory", root) for name in names]
    return min(found) if (found := [limit for limit in limits if limit is not None]) else None


def _share(folder: Path) -> float | None:
    """The processors of one group's quota; None if it has none ("max", or -1 in version 1)."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:  # version 1 has a file for each
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the group that this process is in, and of the groups above it, for one controller."""
    member = dict(_memberships(root))
    for mount, beneath, kind in _mounts(root):
        if kind == "cgroup2":
            path = member.get("")
        elif controller in mount.name.split(","):
            path = member.get(controller)
        else:
            continue
        if path is None:
            continue
        # Without a cgroup namespace the path is the host's, and begins with what is mounted.
        inside = path[len(beneath) :] if f"{path}/".startswith(f"{beneath}/") else "/"
        folder = mount / inside.strip("/")
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Controller and path of each line of /proc/self/cgroup; the controller of version 2 is ""."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.count(":") >= 2:
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                yield controller, path


def _mounts(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folder, mounted part and file system of each control group in /proc/self/mountinfo."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields = front.split()
        kind = back.split(" ", 1)[0]
        if kind in ("cgroup", "cgroup2") and len(fields) > 4:
            yield root / fields[4].strip("/"), fields[3].rstrip("/"), kind


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
