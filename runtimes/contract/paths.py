"""The ways in which one engine computes a step, and those that were taken: what a self-test has to cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Paths:
    """The paths of a session: each is computed by kernels, buffers or a captured graph of its own.

    possible: what there is, in words for people. taken: those that a step has gone since the session was
    opened. batches: numbers of rows which together reach every path.
    """

    possible: tuple[str, ...]
    batches: tuple[int, ...]
    taken: set[str] = field(default_factory=set)

    @property
    def missing(self) -> tuple[str, ...]:
        """The paths that no step has gone."""
        return tuple(path for path in self.possible if path not in self.taken)

    def without(self, before: Iterable[str]) -> None:
        """Forgets the steps since `before`, a copy of `taken`: their answers were compared with nothing."""
        self.taken = set(before)
