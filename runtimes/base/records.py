"""Turns JSON into frozen dataclasses and back; unknown keys, wrong types and values out of range are refused.

Everything that the project writes as JSON goes through this module: configurations, rules and specs. A type
may have limits, as in `Annotated[int, Range(1, 64, whole=True)]`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range

Record = TypeVar("Record")
# A union with a Literal is a typing.Union, others are a types.UnionType.
UNIONS = (types.UnionType, typing.Union)
# What people who write JSON call the types of Python.
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Word:
    """The characters and lengths of a text."""

    expected: str
    """What such a text is, for messages."""
    first: str
    """The characters that may begin it."""
    rest: str
    """The characters of the rest."""
    least: int = 1
    most: int = 100

    def __contains__(self, value: str) -> bool:
        inside = set(value[:1]) <= set(self.first) and set(value) <= set(self.rest)
        return inside and self.least <= len(value) <= self.most


# Of a class, with limits; working them out takes as long as all else.
type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@functools.cache
def limits(hint: Any) -> tuple[Any, tuple[Range | Word, ...]]:
    """A type without its limits, and the limits."""
    if typing.get_origin(hint) is not Annotated:
        return hint, ()
    plain, *more = typing.get_args(hint)
    return plain, tuple(each for each in more if isinstance(each, Range | Word))


def refuse_out_of_range(record: Any, section: str = "") -> None:
    """Raises ConfigError for a value of a dataclass that is out of the range, or none of the choices, of its
    type.

    section: goes before the name of the field in the message, such as `model.`.
    """
    for name, hint in type_hints(type(record)).items():  # type: ignore[arg-type]
        _refuse_beyond(hint, getattr(record, name), where=f"{section}{name}")


def _refuse_beyond(hint: Any, value: Any, *, where: str) -> None:
    plain, beyond = limits(hint)
    for limit in beyond:
        if value not in limit:
            raise ConfigError(f"{where} is {value!r:.60}; expected {limit.expected}.")
    args = typing.get_args(plain)
    if typing.get_origin(plain) is typing.Literal and value not in args:
        raise ConfigError(f"{where} is {value!r:.60}; expected one of {', '.join(map(str, args))}.")
    if typing.get_origin(plain) is tuple:
        for item in value:
            _refuse_beyond(args[0], item, where=where)
    elif typing.get_origin(plain) in UNIONS and value is not None:
        kinds = [arg for arg in args if arg is not type(None)]
        for kind in kinds:
            if len(kinds) == 1 or limits(kind)[0] is type(value):
                _refuse_beyond(kind, value, where=where)


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON, with the options of `json.dumps`, which nothing else here calls: without this one it
    would write NaN and Infinity, which JSON does not have. Raises ValueError for such a number.
    """
    return json.dumps(value, allow_nan=False, **options)


def finite_or_null(value: Any) -> Any:
    """`value` for JSON, with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(cls: type[Record], data: Any, *, where: str) -> Record:
    """An instance of the dataclass `cls` from parsed JSON.

    `where` names the source in messages. Raises ConfigError for anything that is not an object with
    exactly the known keys and the declared types (a float field accepts an int, never a NaN). A `dict`
    or `tuple[X, ...]` field checks its items; nested dataclasses are built the same way.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {_kind(data)}.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        meant = probably_meant(unknown[0], cls)
        advice = f"{meant!r} was probably meant, and the" if meant else "the"
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; {advice} known keys are {', '.join(sorted(fields))}."
        )
    hints = type_hints(cls)  # type: ignore[arg-type]
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = convert(hints[name], data[name], where=f"{where}, key {name!r}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the key {name!r} is missing.")
    return cls(**values)


def to_json(record: Any) -> dict[str, Any]:
    """The JSON form of a dataclass: the inverse of `from_json`."""
    return dataclasses.asdict(record)


def probably_meant(key: str, cls: type) -> str | None:
    """The known key that was probably meant, as a path such as `model.layers`; None if no key is similar.

    It is a key of the same name inside another record, a key with these initials or the initials of the given
    key, a prefix of the given key, or a key with a similar spelling.
    """
    import difflib  # only a mistake needs it, and importing it takes time

    paths = list(_paths(cls))
    names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    initials = {"".join(word[0] for word in name.split("_")): path for name, path in reversed(names.items())}
    near = difflib.get_close_matches(key, names, n=1)
    longer = next((path for name, path in names.items() if key.startswith(f"{name}_")), None)
    shorter = names.get("".join(word[:1] for word in key.split("_"))) if "_" in key else None
    likely = names.get(key) or initials.get(key) or shorter or longer
    return likely or (names[near[0]] if near else None)


def _paths(cls: type) -> Iterator[str]:
    """The keys of a record, and after them the keys of the records inside it with their paths."""
    hints = type_hints(cls)
    yield from hints
    for name, hint in hints.items():
        for inner in (hint, *typing.get_args(hint)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from (f"{name}.{path}" for path in _paths(inner))


def convert(hint: Any, value: Any, *, where: str) -> Any:
    """The value of a field of type `hint` from parsed JSON; raises ConfigError for another kind of value."""
    plain, beyond = limits(hint)
    if plain is not hint:
        converted = convert(plain, value, where=where)
        for limit in beyond:
            if converted is not None and converted not in limit:
                raise ConfigError(f"{where}: expected {limit.expected}, found {_kind(value)}.")
        return converted
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where=where)
    if origin in UNIONS:
        if value is None and type(None) in args:
            return None
        for arg in args:  # one of several plain types
            if limits(arg)[0] is type(value):
                return convert(arg, value, where=where)
        # Of several records, the one that has most of the keys.
        keys = set(value) if isinstance(value, dict) else set[str]()
        kinds = [arg for arg in args if arg is not type(None)]
        return convert(max(kinds, key=lambda kind: len(keys & _field_names(kind))), value, where=where)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where}: expected one of {', '.join(map(str, args))}, found {value!r:.40}.")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(args[0], item, where=where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {
            convert(args[0], key, where=where): convert(args[1], item, where=f"{where}, {key!r:.60}")
            for key, item in value.items()
        }
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if hint is float and type(value) in (int, float):
        found = value if isinstance(value, float) else "one beyond 1.8e308"
        raise ConfigError(f"{where}: expected a finite number, found {found}.")
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ConfigError(f"{where}: expected {KINDS[origin or hint]}, found {_kind(value)}.")


def _field_names(kind: Any) -> set[str]:
    kind = limits(kind)[0]
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _kind(value: Any) -> str:
    """What was found, in the words of JSON: the number 3, the text 'abc', true, null."""
    if value is None or isinstance(value, bool):
        return json_text(value)
    kind = "number" if isinstance(value, int | float) else KINDS.get(type(value), "value").split()[-1]
    return f"the {kind} {value!r:.40}"
