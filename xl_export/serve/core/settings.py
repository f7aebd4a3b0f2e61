"""The settings of an engine, and the figures that it reports."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from runtimes.base.errors import ConfigError

QUEUED = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sizes of an engine."""

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

    def __post_init__(self) -> None:
        for name in ("rows", "queue", "prompt_tokens", "unread", "state_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1.")


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


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine does now, and what it has done since it was started."""

    #: R.
    rows: int
    #: Rows that draw tokens.
    decoding: int
    #: Rows that are fed tokens of their tasks.
    prompts: int
    #: Tasks without a row, paused ones included.
    waiting: int
    #: Waiting tasks whose client does not accept answers; they do not count against `EngineSettings.queue`.
    paused: int
    #: Tokens of tasks, without those that were found in the cache.
    tokens_fed: int
    tokens_cached: int
    #: Of pieces, beyond their tokens.
    tokens_padded: int
    tokens_drawn: int
    #: Of the session.
    steps: int
    #: By their reason.
    tasks_ended: dict[str, int]
    #: How often a task gave up its row to others.
    preempted: int
    #: How often the memory of a row was copied, between rows or in and out.
    moved: int
    #: Of the engine's thread, in steps of the session.
    model_seconds: float
    #: Of the engine's thread, in everything else but waiting for work.
    other_seconds: float
    #: Seconds from the submission of each task to its first row, without bulk, which waits for others, and
    #: without tasks that end before they have a row; it goes on growing.
    queued: Histogram
    #: None if a trial at the start found each row bitwise independent of the rows that are stepped with it,
    #: so that the same seed gives the same tokens under any load; otherwise what the trial found.
    dependence: str | None

    @property
    def free(self) -> int:
        """How many rows have no task."""
        return self.rows - self.decoding - self.prompts
