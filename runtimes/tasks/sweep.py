"""The settings of a sweep: one model under several memory rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from runtimes.base.errors import ConfigError
from runtimes.base.machine import refuse_beyond_memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session

MAX_VALUES = 1000  # values of one option, and settings of one sweep


def parse_values(text: str, option: str, *, least: int = 0) -> tuple[int, ...]:
    """The whole numbers in `64,128,256` or in `100:1000:100` (first, last, step), without repetition, in the
    given order.

    Raises ConfigError, naming the option, for anything else and for numbers below `least`.
    """
    values: list[int] = []
    try:
        for part in text.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            last, step = rest or (first, 1)
            if step < 1 or last < first:
                raise ValueError("no values between first and last")
            values += range(first, last + 1, step)[: MAX_VALUES + 1]
    except ValueError:
        values = []
    if not values or min(values) < least or len(values) > MAX_VALUES:
        raise ConfigError(
            f"{option} is {text!r:.60}; expected whole numbers from {least} on, such as 64,128,256 or "
            f"100:1000:100 (first, last, step), at most {MAX_VALUES}."
        )
    return tuple(dict.fromkeys(values))


def sweep(
    own: MemoryRule,
    *,
    mem_lens: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
    clamp_lens: Sequence[int] | None = None,
) -> list[tuple[MemoryRule, int]]:
    """Every combination of the given values, as pairs of a rule and the number of tokens to feed per step.

    own: the rule of the model; it gives the value of each option that is None. A clamp of 0 means no clamp.
    The segment of a rule is raised where a longer segment is to be fed. Raises ConfigError for impossible
    values.
    """
    clamps = [own.clamp_len] if clamp_lens is None else [clamp or None for clamp in clamp_lens]
    combinations = list(itertools.product(mem_lens or (own.mem_len,), segments or (own.segment,), clamps))
    if len(combinations) > MAX_VALUES:
        raise ConfigError(
            f"the sweep has {len(combinations):,} settings; expected at most {MAX_VALUES}, so give fewer "
            "values."
        )
    return [
        (
            dataclasses.replace(own, mem_len=mem_len, segment=max(segment, own.segment), clamp_len=clamp),
            segment,
        )
        for mem_len, segment, clamp in combinations
    ]


def refuse_if_too_large(session: Session, *, rows: int, segment: int) -> None:
    """Raises StreamError if a step of `rows` streams and `segment` tokens takes more memory than this
    machine has.
    """
    refuse_beyond_memory(
        rows * session.step_bytes(segment=segment),
        what=f"a step of {rows} x {segment:,} tokens with memory {session.rule.mem_len:,}",
        fix="give a smaller --segment, --mem-len or --lanes",
    )
