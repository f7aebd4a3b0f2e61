"""A clock for one module: other threads of the process, such as servers of other tests, keep the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def set_clock(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., object]
) -> None:
    """Replaces functions of `time` for one module: `set_clock(monkeypatch, progress, monotonic=tick)`."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**(vars(module.time) | functions)))
