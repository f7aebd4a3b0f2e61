"""Keeps the memory that training frees in the process, where PyTorch takes it from the C library.

Every step takes and frees the same tensors. glibc gives larger ones back to the system at once, and the
system clears each page again when it is next written. On a virtual machine this was a tenth of a step in fp32
and more in bf16, where tensors are cast (`docs/log.md`).
"""

from __future__ import annotations

import ctypes
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names of mallopt(3) without their M_
NEVER, LARGEST = 2**31 - 1, 2**30  # bytes; a single tensor beyond a GiB costs far more than its pages


def keep_freed_memory() -> bool:
    """Lets this process keep freed memory for its next allocations, until it ends; whether that was possible.

    It changes no result. It does nothing where the C library is not glibc, which has other rules.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt  # returns 1 where it has done so
    return bool(mallopt(TRIM_THRESHOLD, NEVER) == 1 and mallopt(MMAP_THRESHOLD, LARGEST) == 1)
