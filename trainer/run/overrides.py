"""Changes of single keys of a configuration, as `xl-export train --set KEY=VALUE` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from runtimes.base.errors import ConfigError
from runtimes.base.records import convert, to_json
from trainer.run.config import TrainConfig


def with_overrides(config: TrainConfig, assignments: Iterable[str]) -> TrainConfig:
    """The configuration with these changes, such as `model.d_model=512` and `averaging.start_step=900`.

    A value is JSON, or text without quotes. A key inside an object that is null makes the object. `steps`
    shortens or lengthens the whole recipe (`TrainConfig.with_steps`), before the other changes. Raises
    ConfigError for an unknown key, another kind of value, or values that do not fit each other.
    """
    values = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, such as model.d_model=512.")
        values[key] = _parsed(text)
    if "steps" in values:
        config = config.with_steps(convert(int, values.pop("steps"), where="--set, key 'steps'"))
    data = to_json(config)
    for key, value in values.items():
        *sections, last = key.split(".")
        place = data
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise ConfigError(f"--set {key}: {section} has no keys; give {section}=VALUE.")
        place[last] = value
    return TrainConfig.from_json(data, where="--set")


def keys_of(assignments: Iterable[str]) -> set[str]:
    """The keys that the assignments change."""
    return {assignment.partition("=")[0] for assignment in assignments}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
