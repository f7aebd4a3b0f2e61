"""The settings of an engine, and how its figures are counted."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

QUEUED = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sizes of an engine, all at least 1."""

    #: R, how many streams advance at once.
    rows: int = 32
    #: The most tasks that wait for a row; more are refused before any work, and bulk and single tenants may
    #: have a part of it (see `Admission`).
    queue: int = 1024
    #: The most tokens of prompts that are fed in one iteration, padding included; at least one piece is
    #: always fed.
    prompt_tokens: int = 128
    #: After so many answers that its client has not accepted, a task pauses and gives its row to others.
    unread: int = 256
    #: The most bytes of the states with which tasks begin; likewise of the rows that were copied because a
    #: client accepts no answers (half of them for one tenant), and of those that were preempted. One state or
    #: copy is always admitted.
    state_bytes: int = 4 << 30


class Histogram:
    """How often a value fell between two bounds. One thread adds to it, and any may read it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Notes a value, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """Adds the values of another one with the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and how many values are at most that."""
        total = 0
        found = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found
