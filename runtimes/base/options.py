"""Options of commands, declared at the fields of a dataclass.

`rows: Annotated[int, Range(1, 9, whole=True), Option("--rows", "The number of rows.")] = 4` is a field with a
range, which JSON and Python are checked against, and an option with this range, help and default.
`runtimes.cli.options.options_of` makes the options of a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar, get_args, get_origin

from runtimes.base.ranges import ANY, Range
from runtimes.base.records import UNIONS, limits, type_hints

MB = 1 << 20
Record = TypeVar("Record")


@dataclass(frozen=True)
class Option:
    """The option of a field."""

    name: str
    """Name of the option, such as `--mem-len`."""
    help: str
    unit: int = 1
    """Factor from the number of the option to the number of the field, such as MB."""


@dataclass(frozen=True)
class Declared:
    """A field that is an option of a command."""

    field: Field[Any]
    option: Option
    kind: Any
    """Type of the field without limits and without None."""
    range: Range
    """Range of the field; all numbers if it has no range."""


def declared(record: Any) -> Iterator[Declared]:
    """The fields of a dataclass that are options of a command."""
    for field in fields(record):
        hint = type_hints(record)[field.name]
        found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)]
        kind, ranges = limits(hint)
        if get_origin(kind) in UNIONS:
            kind, more = limits(next(each for each in get_args(kind) if each is not type(None)))
            ranges = (*ranges, *more)
        for option in found:
            yield Declared(field, option, kind, next((r for r in ranges if isinstance(r, Range)), ANY))


def record_of(kind: type[Record], given: Mapping[str, Any]) -> Record:
    """A dataclass with what the options of a command have given, in the units of the fields."""
    units = {each.field.name: each.option.unit for each in declared(kind)}
    return kind(**{name: given[name] if unit == 1 else given[name] * unit for name, unit in units.items()})
