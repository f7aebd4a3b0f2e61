"""Translates the names of tensors between two projects.

The table goes from patterns to patterns. In a pattern {} is a number, and a * at the end is the rest of the
name. A name that fits no pattern stays as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

PLACE = re.compile(r"\{\}|\*")


def translated(name: str, names: Mapping[str, str]) -> str:
    """The name in the other project."""
    for pattern, target in names.items():
        if match := _compiled(pattern).fullmatch(name):
            pieces = PLACE.split(target)
            return pieces[0] + "".join(map("".join, zip(match.groups(), pieces[1:], strict=True)))
    return name


def back(name: str, names: Mapping[str, str]) -> str:
    """The name that `translated` made of another; a pattern that fits every name is passed over."""
    return translated(name, {target: pattern for pattern, target in names.items() if target != "*"})


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{\}", r"(\d{1,6})").replace(r"\*", "(.*)"), re.DOTALL)
