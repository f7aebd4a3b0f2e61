"""What a checkpoint does not say of how its model is evaluated: from flags, a file, or what its project published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runtimes.errors import ConfigError
from runtimes.rule import MAX_LENGTH, MemoryRule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Lengths and mask in the words of the project that trained the model; null for what is not given.

    mem_len: its own `mem_len`, whatever its mask makes of that. segment: tokens of one step (`tgt_len`, `block_sz`). mask:
    `same-length` (its flag `same_length`) or `full`. clamp_len: the largest distance with a position of its own; 0 or -1: none.
    ramp: width of the soft edge of adaptive spans (`adapt_span_ramp`).
    """

    mem_len: int | None = None
    segment: int | None = None
    mask: Literal["same-length", "full"] | None = None
    clamp_len: int | None = None
    ramp: int | None = None

    def __post_init__(self) -> None:
        least = {"mem_len": 0, "segment": 1, "clamp_len": -1, "ramp": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and not value <= given <= MAX_LENGTH:
                raise ConfigError(f"{name} is {given}; expected {value} to {MAX_LENGTH}.")


@dataclass(frozen=True)
class Setting:
    """One value and where it comes from: an option, a file, the checkpoint, or what was published."""

    value: Any
    origin: str


class Given:
    """What the user gave, the first source first: (its name, its settings)."""

    def __init__(self, *sources: tuple[str, Settings]) -> None:
        self.sources = sources

    def over(self, project: str, defaults: Mapping[str, Setting]) -> dict[str, Setting]:
        """`defaults` with what was given in their place; raises ConfigError for a setting that the project has no use for."""
        chosen = dict(defaults)
        for origin, settings in reversed(self.sources):
            for field in dataclasses.fields(settings):
                if (value := getattr(settings, field.name)) is None:
                    continue
                if field.name not in defaults:
                    raise ConfigError(
                        f"{field.name} was given ({origin}), and a {project} checkpoint takes {', '.join(defaults)} alone: "
                        "it holds the rest; leave it out."
                    )
                chosen[field.name] = Setting(max(value, 0) if field.name == "clamp_len" else value, origin)
        return chosen


def memory_rule(
    chosen: Mapping[str, Setting], *, project: str, beyond_self: int, initial_memory: Literal["masked", "zeros"]
) -> MemoryRule:
    """The rule of a Transformer-XL model under its project's settings.

    beyond_self: how many tokens its `same_length` mask shows besides the token itself, less its mem_len: 0, or -1 where
    mem_len counts the token itself too.
    """
    mem_len, mask = chosen["mem_len"].value, chosen["mask"].value
    if mask == "same-length" and mem_len + beyond_self < 0:
        raise ConfigError(
            f"mem_len is {mem_len} with a same-length mask, under which a {project} model sees nothing, not even the token "
            "itself; give --mem-len 1 or more, or --mask full."
        )
    return MemoryRule(
        mem_len=mem_len + (beyond_self if mask == "same-length" else 0),
        segment=chosen["segment"].value,
        mask=mask,
        clamp_len=chosen["clamp_len"].value or None,
        initial_memory=initial_memory,
    )


def published(name: str, *, segment: int, mem_len: int, clamp_len: int) -> dict[str, Setting]:
    """The evaluation that a project published for its model `name`."""
    origin = f"published for {name}"
    values = {"mem_len": mem_len, "segment": segment, "mask": "same-length", "clamp_len": clamp_len}
    return {key: Setting(value, origin) for key, value in values.items()}
