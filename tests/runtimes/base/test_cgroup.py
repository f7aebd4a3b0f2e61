"""Threads and memory follow the container, not its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.base import machine
from runtimes.base.cgroup import cpu_limit, memory_limit

# Each: what /proc/self/cgroup and /proc/self/mountinfo say, the files of the groups, CPUs, bytes.
V2 = "27 23 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "30 25 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CASES = {
    "no groups": ("", "", {}, None, None),
    "version 2, in a container": (
        "0::/\n",
        V2,
        {"cpu.max": "200000 100000", "memory.max": "1073741824"},
        2,
        2**30,
    ),
    "no limits": ("0::/\n", V2, {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
    "part of a processor": ("0::/\n", V2, {"cpu.max": "50000 100000"}, 1, None),
    "one and a half": ("0::/\n", V2, {"cpu.max": "150000 100000"}, 2, None),
    "the group above is narrower": (
        "0::/pod/box\n",
        V2,
        {
            "pod/box/cpu.max": "400000 100000",
            "pod/cpu.max": "300000 100000",
            "pod/box/memory.max": "7",
            "memory.max": "9",
        },
        3,
        7,
    ),
    "version 1": (
        "4:memory:/box\n3:cpu,cpuacct:/box\n",
        V1,
        {
            "cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": "4096",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
        3,
        4096,
    ),
    "version 1, its own part mounted": (
        "4:memory:/docker/abc\n",
        "31 25 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        {"memory/memory.limit_in_bytes": "5"},
        None,
        5,
    ),
    "nonsense": (
        "what\n::\n",
        "is this\n - cgroup2\n" + V2,
        {"cpu.max": "a b", "memory.max": "-3"},
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_limit_counts(name: str, tmp_path: Path) -> None:
    member, mounts, files, cpus, num_bytes = CASES[name]
    proc, groups = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(member)
    (proc / "mountinfo").write_text(mounts)
    for path, text in files.items():
        (groups / path).parent.mkdir(parents=True, exist_ok=True)
        (groups / path).write_text(text + "\n")
    assert cpu_limit(tmp_path) == cpus
    assert memory_limit(tmp_path) == num_bytes


def test_this_machine_is_what_is_left_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.memory_bytes()
    monkeypatch.setattr(machine, "cpu_limit", lambda: 1)
    monkeypatch.setattr(machine, "memory_limit", lambda: whole // 2)
    assert machine.available_cpus() == 1
    assert machine.memory_bytes() == whole // 2
    monkeypatch.setattr(machine, "cpu_limit", lambda: 10**6)
    monkeypatch.setattr(machine, "memory_limit", lambda: 10**18)
    assert machine.available_cpus() < 10**6
    assert machine.memory_bytes() == whole
