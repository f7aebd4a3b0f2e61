"""One model under several memory rules: which settings a sweep has, and a session for each."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

from runtimes.base.errors import ConfigError, StreamError
from runtimes.base.machine import memory_bytes
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from trainer.run.session import TorchSession

MOST_VALUES = 1000  # of one option, and settings of one sweep


def parse_values(text: str, option: str, *, least: int = 0) -> tuple[int, ...]:
    """The whole numbers in `64,128,256` or in `100:1000:100` (first, last, step), each once, in the order given.

    Raises ConfigError, naming the option, for anything else and for numbers below `least`.
    """
    values: list[int] = []
    try:
        for part in text.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            last, step = rest or (first, 1)
            if step < 1 or last < first:
                raise ValueError("no values between first and last")
            values += range(first, last + 1, step)[: MOST_VALUES + 1]
    except ValueError:
        values = []
    if not values or min(values) < least or len(values) > MOST_VALUES:
        raise ConfigError(
            f"{option} is {text!r:.60}; expected whole numbers from {least} on, such as 64,128,256 or 100:1000:100 "
            f"(first, last, step), at most {MOST_VALUES}."
        )
    return tuple(dict.fromkeys(values))


def sweep(
    own: MemoryRule,
    *,
    mem_lens: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
    clamp_lens: Sequence[int] | None = None,
) -> list[tuple[MemoryRule, int]]:
    """Every combination of the given values, as rules and the tokens to feed per step; the model's `own` where None.

    A clamp of 0 is none. A rule's segment is raised where a longer one is to be fed. Raises ConfigError for impossible values.
    """
    clamps = [own.clamp_len] if clamp_lens is None else [clamp or None for clamp in clamp_lens]
    combinations = list(itertools.product(mem_lens or (own.mem_len,), segments or (own.segment,), clamps))
    if len(combinations) > MOST_VALUES:
        raise ConfigError(
            f"the sweep has {len(combinations):,} settings; expected at most {MOST_VALUES}, so give fewer values."
        )
    return [
        (
            dataclasses.replace(own, mem_len=mem_len, segment=max(segment, own.segment), clamp_len=clamp),
            segment,
        )
        for mem_len, segment, clamp in combinations
    ]


def under(session: Session, rule: MemoryRule) -> Session:
    """The session's model under another rule. A run takes any; raises StreamError for an artefact, whose rule is fixed.

    The weights are shared, not read again: a run that is still in training keeps one model through a sweep.
    """
    own = session.rule
    if rule == own:
        return session
    if isinstance(session, TorchSession):
        identity = hashlib.sha256(f"{session.identity} {rule}".encode()).hexdigest()
        return TorchSession(session.model, session.vocab, rule, identity=identity)
    if rule.segment > own.segment:
        raise StreamError(
            f"segment is {rule.segment}; this artefact takes 1 to {own.segment} tokens a step: give a smaller one, "
            "or export with a larger --segment."
        )
    name = "mem_len" if rule.mem_len != own.mem_len else "clamp_len"
    option, wanted, fixed = f"--{name.replace('_', '-')}", getattr(rule, name), getattr(own, name)
    given = "none" if wanted is None else wanted
    raise StreamError(
        f"{option} is {given} and this artefact was exported with {'none' if fixed is None else fixed}, which is fixed there: "
        f"export again with {option} {wanted or 0}, or give the run that it was made from."
    )


def refuse_if_too_large(session: Session, *, rows: int, segment: int) -> None:
    """Raises StreamError where a step of `rows` streams and `segment` tokens takes more memory than this machine has."""
    needed = rows * step_bytes(session, segment=segment)
    if needed > memory_bytes():
        raise StreamError(
            f"a step of {rows} x {segment:,} tokens with memory {session.rule.mem_len:,} takes about {needed / 2**30:,.0f} GiB "
            f"and this machine has {memory_bytes() / 2**30:.0f}; give a smaller --segment, --mem-len or --lanes."
        )


def step_bytes(session: Session, *, segment: int) -> int:
    """About what one row of a step takes: memory before and after, logits, and PyTorch's attention scores."""
    state = sum(tensor.num_bytes(batch=1) for tensor in session.state)
    scores = 0
    if isinstance(session, TorchSession):
        scores = session.model.facts().heads * segment * (session.rule.mem_len + segment)
    return 2 * state + 4 * (5 * scores + 3 * segment * session.vocab.size)
