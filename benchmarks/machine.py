"""What numbers were measured on (no host names, no paths), and the file in which results are kept."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from runtimes.base.machine import available_cpus, busy_cpus, memory_bytes, package_versions
from runtimes.base.startup import SPIN

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20}
BUSY_SHARE = 0.1  # of the CPUs: the most that other processes may use during a published measurement
WAITING = ("OMP_WAIT_POLICY", SPIN)


def cache_bytes() -> int:
    """The largest cache that the first CPU reads through; 0 if the system does not report it."""
    sizes = [0]
    for path in CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text(encoding="utf-8").strip()
            sizes.append(int(text[:-1]) * UNITS[text[-1]])
    return max(sizes)


def machine_facts() -> dict[str, Any]:
    """The processor, the CPUs that this process may use, the memory, and how many CPUs were busy now.

    threads_wait: how the waiting threads of PyTorch are told to wait (see `prepare_training`).
    """
    return {
        "cpu": _cpu_model(),
        "cpus": available_cpus(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "busy_cpus": round(busy_cpus(), 2),
        "threads_wait": " ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of every package that the numbers depend on."""
    return {"python": platform.python_version(), **package_versions()}


def checkout() -> Path | None:
    """The folder of this project's source if this package is part of it; None if it is installed."""
    folder = Path(__file__).resolve().parent.parent
    with contextlib.suppress(OSError):
        if 'name = "xl-export"' in (folder / "pyproject.toml").read_text(encoding="utf-8"):
            return folder
    return None


def history_file() -> Path:
    """Where results are kept: benchmarks/history.jsonl in a checkout of this project, or a local file.

    Elsewhere it is in the working folder, so that nothing is ever written into an installed package.
    """
    folder = checkout()
    if folder is not None and Path.cwd().resolve().is_relative_to(folder):
        return folder / "benchmarks" / "history.jsonl"
    return Path("benchmark-history.jsonl")


def commit() -> str | None:
    """The commit of this checkout, with `+` if files differ from it; None outside a checkout.

    The history of measurements does not count, since each measurement adds to it.
    """
    folder = checkout()
    if folder is None:  # an installed package may lie in the checkout of another project
        return None
    status = [
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/",
        ":!/benchmarks/history.jsonl",
    ]
    commands = (["git", "rev-parse", "HEAD"], status)
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
