"""Which stage of a trace runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from runtimes.base.progress import working

STAGES = ("comparing the module with itself", "tracing", "comparing the graph with the module")


def stage(name: str, *, advice: str | None = None) -> AbstractContextManager[Callable[[str], None]]:
    """Shows one of the `STAGES` while the block runs."""
    return working(f"trace, stage {STAGES.index(name) + 1} of {len(STAGES)}: {name}", advice=advice)
