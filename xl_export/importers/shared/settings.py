"""Settings of an evaluation that a checkpoint does not hold.

They come from options, from a file, or from what the checkpoint's project published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_json
from runtimes.base.records import from_json
from runtimes.contract.rule import MAX_LENGTH, InitialMemory, Mask, MemoryRule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Lengths and mask in the words of the project that trained the model; None if one is not set.

    n_head, cutoffs and pre_lnorm belong to the model. They are for bare state dicts, whose tensors do not
    show them.
    """

    # The project's own `mem_len`; its mask decides whether the own token counts.
    mem_len: int | None = None
    segment: int | None = None  # tokens of one step (`tgt_len`, `block_sz`)
    mask: Mask | None = None  # `same-length` (the flag `same_length`) or `full`
    # The largest distance with its own position; 0 or -1 for no clamp.
    clamp_len: int | None = None
    ramp: int | None = None  # the width of the soft edge of adaptive spans (`adapt_span_ramp`)
    n_head: int | None = None
    cutoffs: tuple[int, ...] | None = None
    pre_lnorm: bool | None = None

    def __post_init__(self) -> None:
        least = {"mem_len": 0, "segment": 1, "clamp_len": -1, "ramp": 1, "n_head": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and not value <= given <= MAX_LENGTH:
                raise ConfigError(f"{name} is {given}; expected {value} to {MAX_LENGTH}.")


# From the words on the command lines of the projects to the names of `Settings`.
WORDS = {
    "tgt_len": "segment",
    "eval_tgt_len": "segment",
    "block_sz": "segment",
    "same_length": "mask",
    "adapt_span_ramp": "ramp",
}


def read_settings(path: Path) -> Settings:
    """Returns the settings in a JSON file, which uses the names here or the projects' words (`WORDS`).

    `same_length` is true or false. A `clamp_len` of null means no clamp, as `eval --json` and config.json
    write it. Any other null means that the setting is not set. Raises ConfigError for an unknown key, and for
    two words that set one setting to different values.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        return from_json(Settings, data, where=str(path))  # raises ConfigError
    chosen: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for word, value in data.items():
        name = WORDS.get(word) or word
        if word == "same_length" and value is not None:
            if type(value) is not bool:
                raise ConfigError(f"{path}: same_length is {value!r:.40}; expected true or false.")
            value = "same-length" if value else "full"
        elif word == "clamp_len" and value is None:
            value = 0
        if value is None and word in WORDS:
            continue
        if name in chosen and chosen[name] != value:
            raise ConfigError(
                f"{path}: {spelled[name]} is {data[spelled[name]]!r:.40} and {word} {data[word]!r:.40}; give "
                f"one of them."
            )
        chosen[name] = value
        spelled[name] = word
    unknown = sorted(set(chosen) - {field.name for field in dataclasses.fields(Settings)})
    if unknown:
        names = ", ".join([field.name for field in dataclasses.fields(Settings)] + list(WORDS))
        raise ConfigError(f"{path}: unknown key {unknown[0]!r:.40}; the known keys are {names}.")
    return from_json(Settings, chosen, where=str(path))


@dataclass(frozen=True)
class Setting:
    """One value of a setting."""

    value: Any
    origin: str  # an option, a file, the checkpoint, or what was published


class Overrides:
    """Settings that the user chose, as pairs of an origin and its settings; earlier pairs win."""

    def __init__(self, *sources: tuple[str, Settings]) -> None:
        self.sources = sources

    def chosen(self, name: str) -> Any:
        """Returns the value that the user chose for a setting; None if it was not chosen."""
        values = (getattr(settings, name) for _, settings in self.sources)
        return next((value for value in values if value is not None), None)

    def applied_to(self, project: str, defaults: Mapping[str, Setting]) -> dict[str, Setting]:
        """Returns `defaults`, with the values that the user chose in their place.

        Raises ConfigError for a setting that the project does not use.
        """
        chosen = dict(defaults)
        for origin, settings in reversed(self.sources):
            for field in dataclasses.fields(settings):
                if (value := getattr(settings, field.name)) is None:
                    continue
                if field.name not in defaults:
                    raise ConfigError(
                        f"{field.name} is set ({origin}), and a {project} checkpoint takes only "
                        f"{', '.join(defaults)}; leave {field.name} out."
                    )
                chosen[field.name] = Setting(max(value, 0) if field.name == "clamp_len" else value, origin)
        return chosen


def memory_rule(
    chosen: Mapping[str, Setting],
    *,
    project: str,
    beyond_self: int,
    initial_memory: InitialMemory,
) -> MemoryRule:
    """Returns the rule of a Transformer-XL model under the settings of its project.

    beyond_self: how many tokens the mask `same_length` shows besides the own token, minus mem_len. It is 0,
    or -1 if mem_len also counts the own token. Raises ConfigError if no key would be visible.
    """
    mem_len = chosen["mem_len"].value
    mask = chosen["mask"].value
    if mask == "same-length" and mem_len + beyond_self < 0:
        raise ConfigError(
            f"mem_len is {mem_len} and the mask is same-length: no key would be visible to a {project} "
            "model, not even the token itself; give --mem-len 1 or more, or --mask full."
        )
    return MemoryRule(
        mem_len=mem_len + (beyond_self if mask == "same-length" else 0),
        segment=chosen["segment"].value,
        mask=mask,
        clamp_len=chosen["clamp_len"].value or None,
        initial_memory=initial_memory,
    )


SIZES = {  # layers and d_model of the published models, of which several may share one evaluation
    "enwik8 base": ((12, 512),),
    "text8 base": ((12, 512),),
    "enwik8 and text8 base": ((12, 512),),
    "enwik8 large": ((24, 1024),),
    "text8 large": ((24, 1024),),
    "enwik8 and text8 large": ((24, 1024),),
    "wt103 base": ((16, 410),),
    "wt103 large": ((18, 1024),),
    "lm1b": ((18, 1024), (20, 1024), (24, 1280)),
}
PUBLISHED = "published for "


def size_notes(settings: Mapping[str, Setting], *, layers: int, d_model: int) -> list[str]:
    """Returns one sentence for each published model whose sizes differ from those of this model."""
    models: dict[str, list[str]] = {}
    for name, setting in settings.items():
        if setting.origin.startswith(PUBLISHED):
            models.setdefault(setting.origin.removeprefix(PUBLISHED), []).append(
                f"--{name.replace('_', '-')}"
            )
    return [
        f"sizes differ from the published {model} ({_listed(SIZES[model])}): "
        f"give {', '.join(options)} if it was evaluated otherwise"
        for model, options in models.items()
        if (layers, d_model) not in SIZES[model]
    ]


def _listed(sizes: Sequence[tuple[int, int]]) -> str:
    return " or ".join(f"{layers} layers, D {d_model}" for layers, d_model in sizes)


def published(name: str, *, segment: int, mem_len: int, clamp_len: int) -> dict[str, Setting]:
    """Returns the evaluation that a project published for its model `name`."""
    origin = f"{PUBLISHED}{name}"
    values = {"mem_len": mem_len, "segment": segment, "mask": "same-length", "clamp_len": clamp_len}
    return {key: Setting(value, origin) for key, value in values.items()}
