"""What a figure was measured on: processor, packages and commit. No host names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from runtimes.base.machine import available_cpus, memory_bytes, package_versions

CPUINFO, STAT = Path("/proc/cpuinfo"), Path("/proc/stat")


def machine_facts() -> dict[str, Any]:
    """Processor, its CPUs that this process may use, memory, and how busy the machine was when asked."""
    return {
        "cpu": _cpu_model(),
        "cpus": available_cpus(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "busy_cpus": round(busy_cpus(), 2),
    }


def busy_cpus(seconds: float = 1.0) -> float:
    """How many CPUs others keep busy, while this process sleeps for so long; the load average where the system does not count."""
    if not STAT.is_file():
        return os.getloadavg()[0]
    before = _worked()
    time.sleep(seconds)
    return (_worked() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _worked() -> int:
    """Ticks that all CPUs together have worked, or were kept from this machine by its host."""
    user, nice, system, _idle, _waiting, *rest = map(
        int, STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + sum(rest)


def versions() -> dict[str, str]:
    """Python and every package that has a part in the figures."""
    return {"python": platform.python_version(), **package_versions()}


def commit() -> str | None:
    """The commit of this checkout, with `+` when files differ from it; None outside a checkout."""
    folder = Path(__file__).parent.parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        head, changes = (
            subprocess.run(c, cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout
            for c in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")


def _cpu_model() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
