"""What an engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine does now, and what it has done since it was started.

    rows: R. decoding, prompts: how many of them draw tokens, and are fed tokens of their tasks. waiting: the
    tasks that have no row; those that wait for their client to take answers (paused) are among them, and do
    not count against `EngineSettings.queue`. tokens_fed: of tasks, without those that were found in the cache
    (tokens_cached). tokens_padded: of pieces, beyond their tokens. tokens_drawn: of all tasks. steps: of the
    session. tasks_ended: by their reason. parked: how often a task gave up its row to others. moved: how
    often the memory of a row was copied, between rows or in and out. model_seconds, other_seconds: of the
    engine's thread, in steps of the session and in everything else but waiting for work.

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
    dependence: str | None

    @property
    def free(self) -> int:
        """How many rows have no task."""
        return self.rows - self.decoding - self.prompts
