"""How an engine shares its rows."""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sizes of an engine.

    rows: R, how many streams advance at once. queue: the most tasks that wait for a row; more are refused
    before any work, and bulk and single tenants may have a part of it (see `waiting.Door`). prompt_tokens:
    the most tokens of prompts that are fed in one iteration, padding included; at least one piece is always
    fed. unread: after so many answers that its client has not taken, a task pauses and gives its row to
    others. state_bytes: the most bytes of the states that tasks bring, likewise of the rows that were copied
    because a client takes no answers (half of them for one tenant), and likewise of those that were copied
    because a task gave way to another one; one state or copy is always let in.
    """

    rows: int = 32
    queue: int = 1024
    prompt_tokens: int = 128
    unread: int = 256
    state_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("rows", "queue", "prompt_tokens", "unread", "state_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1.")
