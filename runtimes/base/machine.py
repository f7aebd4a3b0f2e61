"""What this machine has: processors, memory and packages."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def package_versions() -> dict[str, str]:
    """The versions of the packages that have a part in our numbers; those not installed are left out."""
    found = {}
    for package in ("xl-export", "numpy", "onnx-ir", "onnxruntime", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout on the path, or onnxruntime-gpu in onnxruntime's place
            continue
    return found
