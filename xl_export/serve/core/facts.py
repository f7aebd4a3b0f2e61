"""What an engine says of itself."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

QUEUED = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


class Histogram:
    """How often a value fell between two bounds. One thread adds to it, and any may read it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

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
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine does now, and what it has done since it was started.

    rows: R. decoding, prompts: how many of them draw tokens, and are fed tokens of their tasks. waiting: the
    tasks that have no row; those that wait for their client to take answers (paused) are among them, and do
    not count against `EngineSettings.queue`. tokens_fed: of tasks, without those that were found in the cache
    (tokens_cached). tokens_padded: of pieces, beyond their tokens. tokens_drawn: of all tasks. steps: of the
    session. tasks_ended: by their reason. parked: how often a task gave up its row to others. moved: how
    often the memory of a row was copied, between rows or in and out. model_seconds, other_seconds: of the
    engine's thread, in steps of the session and in everything else but waiting for work. queued: seconds from
    the submission of each task to its first row, without bulk, which waits for others, and without tasks that
    end before they have a row; it goes on growing.

    dependence: None where a trial at the start found each row bitwise independent of the rows that are
    stepped with it, so that the same seed gives the same tokens under any load; otherwise a sentence that
    says what the trial found.
    """

    rows: int
    decoding: int
    prompts: int
    waiting: int
    paused: int
    tokens_fed: int
    tokens_cached: int
    tokens_padded: int
    tokens_drawn: int
    steps: int
    tasks_ended: dict[str, int]
    parked: int
    moved: int
    model_seconds: float
    other_seconds: float
    queued: Histogram
    dependence: str | None

    @property
    def free(self) -> int:
        """How many rows have no task."""
        return self.rows - self.decoding - self.prompts
