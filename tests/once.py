"""What several processes share: the first that asks for it makes it, and the others wait."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this test run after `make(folder)` has filled it. Tests must not change it."""
    base = factory.getbasetemp()
    return made_in((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name, make)


def made_in(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder after `make(folder)` has filled it, in this test run or in an earlier one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".finished").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            make(folder)
            folder.with_suffix(".finished").touch()
    return folder
