"""Keeps the memory that training frees in the process, if PyTorch takes it from the C library.

Every step takes and frees the same tensors. glibc gives larger ones back to the system at once, and the
system clears each page again when it is next written. On a virtual machine this was a tenth of a step in fp32
and more in bf16, where tensors are cast (`docs/decisions/training.md`).
"""

from __future__ import annotations

import ctypes
import os
import platform

# The names of mallopt(3) without their M_.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
NEVER_TRIM = -1
KEPT_TENSOR_BYTES = (2**30, 2**25)  # bytes of a tensor that is kept; glibc before 2.35 takes at most 32 MiB
USER_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)  # how users set the same


def keep_freed_memory() -> bool:
    """Lets this process keep freed memory for its next allocations, until it ends; whether that was done.

    It changes no result. It is not done if the user has set one of `USER_VARIABLES`, or if the C library is
    not glibc, which has other rules.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USER_VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt  # returns 1 where it has done so
    # Setting only the other threshold would stop glibc from raising this one by itself, as it usually does.
    sizes_are_kept = any(mallopt(MMAP_THRESHOLD, size) == 1 for size in KEPT_TENSOR_BYTES)
    return sizes_are_kept and bool(mallopt(TRIM_THRESHOLD, NEVER_TRIM) == 1)
