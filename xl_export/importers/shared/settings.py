"""Settings of an evaluation that a checkpoint does not hold.

They come from options, from a file, or from what the checkpoint's project published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_json
from runtimes.base.options import Option
from runtimes.base.ranges import Range
from runtimes.base.records import from_json, refuse_out_of_range
from runtimes.contract.model_facts import Positive, Size
from runtimes.contract.rule import MAX_LENGTH, InitialMemory, Mask, MemoryRule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Lengths and mask in the words of the project that trained the model; None if one is not set.

    n_head, cutoffs and pre_lnorm belong to the model. They are for bare state dicts, whose tensors do not
    show them.
    """

    # The mask decides whether the own token counts.
    mem_len: Annotated[Size | None, Option("--mem-len", "Tokens in the memory: mem_len of the project.")] = (
        None
    )
    segment: Annotated[
        Positive | None,
        Option("--segment", "Tokens in one step: tgt_len or block_sz of the project."),
    ] = None
    mask: Annotated[
        Mask | None,
        Option(
            "--mask",
            "Attention mask: same-length if the project was run with its flag same_length, otherwise full.",
        ),
    ] = None
    clamp_len: Annotated[
        Annotated[int, Range(-1, MAX_LENGTH, whole=True)] | None,
        Option(
            "--clamp-len",
            "Largest distance with a position of its own: clamp_len of the project. 0 or -1 for no limit.",
        ),
    ] = None
    ramp: Annotated[
        Positive | None,
        Option("--ramp", "Width of the soft edge of adaptive spans: adapt_span_ramp of the project."),
    ] = None
    n_head: Positive | None = None
    cutoffs: tuple[int, ...] | None = None
    pre_lnorm: bool | None = None

    def __post_init__(self) -> None:
        refuse_out_of_range(self)

    def chosen(self, origin: str) -> dict[str, Setting]:
        """Returns those that are set, by name. origin: where the user set them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.clamp_len is not None:
            values["clamp_len"] = max(self.clamp_len, 0)
        return {name: Setting(value, origin) for name, value in values.items() if value is not None}


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
    return from_json(Settings, chosen, where=str(path))


@dataclass(frozen=True)
class Setting:
    """One value of a setting."""

    value: Any
    origin: str
    """An option, a file, the checkpoint, or what was published."""
    model: str | None = None
    """The row of `PUBLISHED` that it is from; None for any other origin."""


def of_last_run(stored: Mapping[str, Any], *, origin: str) -> dict[str, Setting]:
    """The evaluation in the settings of a model, in kimiyoung's words."""
    return {
        "mem_len": Setting(stored["mem_len"], origin),
        "segment": Setting(stored.get("tgt_len"), origin),
        "mask": Setting("same-length" if stored["same_length"] else "full", origin),
        "clamp_len": Setting(max(stored["clamp_len"], 0), origin),
    }


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


@dataclass(frozen=True, kw_only=True)
class Published:
    """How a project evaluated a model that it published, with the mask `same-length`."""

    segment: int
    mem_len: int
    clamp_len: int
    sizes: tuple[tuple[int, int], ...]
    """Layers and d_model; several models may share one evaluation."""


BYTES_BASE = Published(segment=80, mem_len=2100, clamp_len=820, sizes=((12, 512),))
BYTES_LARGE = Published(segment=128, mem_len=3800, clamp_len=1000, sizes=((24, 1024),))
PUBLISHED = {
    "enwik8 base": BYTES_BASE,
    "text8 base": BYTES_BASE,
    "enwik8 and text8 base": BYTES_BASE,
    "enwik8 large": BYTES_LARGE,
    "text8 large": BYTES_LARGE,
    "enwik8 and text8 large": BYTES_LARGE,
    "wt103 base": Published(segment=64, mem_len=640, clamp_len=400, sizes=((16, 410),)),
    "wt103 large": Published(segment=128, mem_len=1600, clamp_len=1000, sizes=((18, 1024),)),
    "lm1b": Published(segment=32, mem_len=128, clamp_len=0, sizes=((18, 1024), (20, 1024), (24, 1280))),
}


def published(dataset: str, d_model: int) -> dict[str, Setting]:
    """Returns the evaluation that was published for a data set and a model of this width."""
    name = dataset if dataset == "lm1b" else f"{dataset} {'large' if d_model >= 1024 else 'base'}"
    model = PUBLISHED[name]
    values = {
        "mem_len": model.mem_len,
        "segment": model.segment,
        "mask": "same-length",
        "clamp_len": model.clamp_len,
    }
    return {key: Setting(value, f"published for {name}", name) for key, value in values.items()}


def size_notes(settings: Mapping[str, Setting], *, layers: int, d_model: int) -> list[str]:
    """Returns one sentence for each published model whose sizes differ from this model's."""
    options: dict[str, list[str]] = {}
    for name, setting in settings.items():
        if setting.model is not None:
            options.setdefault(setting.model, []).append(f"--{name.replace('_', '-')}")
    notes = []
    for model, names in options.items():
        sizes = PUBLISHED[model].sizes
        if (layers, d_model) not in sizes:
            listed = " or ".join(f"{layers} layers, D {d_model}" for layers, d_model in sizes)
            notes.append(
                f"this is not the published {model} ({listed}), and only your evaluation knows its settings: "
                f"give {', '.join(names)}, or scores may be wrong"
            )
    return notes
