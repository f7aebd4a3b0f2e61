"""Changes of single keys of a configuration, as `xl-export train --set KEY=VALUE` takes them."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from typing import Any

from runtimes.base.errors import ConfigError
from runtimes.base.records import convert, probably_meant, to_json
from trainer.run.config import TrainConfig


def with_overrides(config: TrainConfig, assignments: Iterable[str]) -> TrainConfig:
    """The configuration with these changes, such as `model.d_model=512` and `averaging.start_step=900`.

    A value is JSON, or text without quotes where the key takes text. A key inside an object that is null
    makes the object. `steps` shortens or lengthens the whole recipe (`TrainConfig.with_steps`), before the
    other changes. Raises ConfigError for an unknown key, another kind of value, or values that do not fit
    each other.
    """
    given = sorted(assignments, key=lambda assignment: not assignment.startswith("steps="))
    keys = [assignment.partition("=")[0] for assignment in given]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--set {twice}=… is given twice; leave out one of them.")
    data = to_json(config)
    for assignment in given:
        key, equals, text = assignment.partition("=")
        where = f"--set {assignment}"
        if not key or not equals:
            raise ConfigError(f"{where}: expected KEY=VALUE, such as model.d_model=512.")
        hint = _hint(key, where=where)
        value = convert(hint, _parsed(text, hint, where=where), where=where)
        if key == "steps":
            data = to_json(config.with_steps(value))
            continue
        *sections, last = key.split(".")
        place = data
        for section in sections:
            place[section] = place[section] if place.get(section) is not None else {}
            place = place[section]
        place[last] = to_json(value) if dataclasses.is_dataclass(value) else value
    return TrainConfig.from_json(data, where=f"--set {' --set '.join(given)}" if given else "configuration")


def keys_of(assignments: Iterable[str]) -> set[str]:
    """The keys that the assignments change."""
    return {assignment.partition("=")[0] for assignment in assignments}


def _hint(key: str, *, where: str) -> Any:
    """The type of a dotted key; raises ConfigError that names the key that was probably meant."""
    hint: Any = TrainConfig
    names = key.split(".")
    for depth, name in enumerate(names):
        record = _record(hint)
        section = ".".join(names[:depth])
        if record is None:
            raise ConfigError(
                f"{where}: {section} is one value and has no key {name!r}; give {section}=VALUE."
            )
        hints = typing.get_type_hints(record)
        if name not in hints:
            meant = _meant(names, depth, record)
            known = f"the known keys{f' of {section}' if section else ''} are {', '.join(sorted(hints))}."
            advice = f"{meant} was probably meant; `xl-export train --show NAME` prints all keys."
            raise ConfigError(f"{where}: there is no key {key}; {advice if meant else known}")
        hint = hints[name]
    return hint


def _meant(names: list[str], depth: int, record: type) -> str | None:
    """The known key that is most like the one whose name at `depth` is not in `record`."""
    inside = probably_meant(names[depth], record)
    if inside is None:
        return probably_meant(names[-1], TrainConfig)
    return ".".join([*names[:depth], inside, *names[depth + 1 :]])


def _record(hint: Any) -> type | None:
    """The dataclass that a type is, or is where it is not null."""
    choices = (hint, *typing.get_args(hint))
    return next((choice for choice in choices if dataclasses.is_dataclass(choice)), None)  # type: ignore[return-value]


def _parsed(text: str, hint: Any, *, where: str) -> Any:
    """The value of `text` for a key of this type: JSON, or the text itself where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if (record := _record(hint)) and not isinstance(value, dict | None):
        keys = ", ".join(typing.get_type_hints(record))
        raise ConfigError(
            f"{where}: expected an object with the keys {keys}, found {text!r:.40}; set one of them, such as "
            f"{where.removeprefix('--set ').partition('=')[0]}.{keys.partition(',')[0]}."
        )
    # A text such as 2024 or true is text where the key takes text and nothing else.
    return text if hint in (str, str | None) and not isinstance(value, str | None) else value
