"""Ranges of numbers: one check and one sentence for arguments of functions and options of commands."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from runtimes.base.errors import UserError


@dataclass(frozen=True)
class Range:
    """The numbers that an argument accepts. Neither NaN nor an infinity is in any range."""

    least: float = -sys.float_info.max
    most: float = sys.float_info.max
    exclusive: bool = False
    """Whether `least` itself is outside of the range."""
    below: bool = False
    """Whether `most` itself is outside of the range."""
    whole: bool = False
    """Whether only integers are inside; 2.0 is none."""

    def __contains__(self, value: object) -> bool:
        kind = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        inside: bool = self.least <= value <= self.most  # type: ignore[operator]
        excluded = (self.exclusive and value == self.least) or (self.below and value == self.most)
        return inside and not excluded

    def check(self, name: str, value: Any, error: type[UserError] = UserError) -> None:
        """Raises `error`, which names the argument, for a value outside of the range."""
        if value not in self:
            raise error(f"{name} is {value!r:.40}; expected {self.expected}.")

    @property
    def expected(self) -> str:
        """The range in words, such as `a whole number from 1 to 8`."""
        kind = "a whole number" if self.whole else "a number"
        if self.least == self.most:
            return _shown(self.least)
        if self.least == ANY.least:
            return kind if self.whole else "a finite number"
        most = f"{'below ' * self.below}{_shown(self.most)}"
        if self.exclusive:
            kind += f" above {_shown(self.least)}"
            return kind if self.most == ANY.most else f"{kind} and {'at most ' * (not self.below)}{most}"
        if self.most == ANY.most:
            return f"{kind} of at least {_shown(self.least)}"
        return f"{kind} from {_shown(self.least)} to {most}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, such as `1 token` or `2 tokens`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _shown(number: float) -> str:
    is_whole = isinstance(number, int) or (abs(number) < 1e15 and number == int(number))
    return f"{int(number)}" if is_whole else f"{number:g}"


ANY = Range()
POSITIVE = Range(1, whole=True)
