"""How long a soak takes and where its random numbers begin: the variables SOAK_SECONDS and SOAK_SEED."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from runtimes.sessions import fused_cpu

HOUR = 3600
SHARES = {"streams": 0.5, "operator": 0.2, "signals": 0.3}  # of the whole time, for each kind of soak


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of the first round; each round adds one, so that a failed round can be repeated alone."""
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(1 << 30))
    print(f"\nsoak: SOAK_SEED={seed}", flush=True)
    return seed


@pytest.fixture
def rounds(seed: int) -> Callable[[str], Iterator[int]]:
    """`rounds("streams")` → a seed for each round, until the share of the time is over; at least one."""

    def count(kind: str) -> Iterator[int]:
        end = time.monotonic() + SHARES[kind] * float(os.environ.get("SOAK_SECONDS") or HOUR)
        number = seed
        yield number
        while time.monotonic() < end:
            number += 1
            yield number

    return count


@pytest.fixture(scope="session")
def fused_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """The fused operator for this processor; None where there is no compiler for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("fused")))
        try:
            yield fused_cpu.build()
        except UserError:
            yield None
