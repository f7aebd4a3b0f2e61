"""What computes: one model, on one kind of device, in every actor and in every call of a work folder."""

from __future__ import annotations

from typing import Any

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session

Facts = dict[str, Any]


def facts_of(model: str, device: str, threads: int, rule: MemoryRule | None = None) -> Facts:
    """The identity of a model, and what computes it on this machine, for a plan.

    rule: to compute under, or None for the model's own.
    """
    return _facts(_opened(model, device, threads, rule))


def open_same(model: str, device: str, threads: int, facts: Facts, rule: MemoryRule | None = None) -> Session:
    """A session of the model; raises ConfigError if its `facts_of` are not `facts`."""
    session = _opened(model, device, threads, rule)
    here = _facts(session)
    if here["model"] != facts["model"]:
        raise ConfigError(
            f"{model} is another model for this actor than for the call ({here['model'][:12]} and "
            f"{facts['model'][:12]}); put the same files at this path on every machine, and leave them alone "
            "until the call ends."
        )
    if here != facts:
        raise ConfigError(
            f"this actor computes with {here['computed_by']}, and the call began with "
            f"{facts['computed_by']}; give a --device that all machines have, and build the fused operator "
            "on all of them or on none."
        )
    return session


def _opened(model: str, device: str, threads: int, rule: MemoryRule | None) -> Session:
    session = open_session(model, threads=threads, device=device)
    return session if rule is None else session.with_rule(rule)


def _facts(session: Session) -> Facts:
    return {"model": session.identity, "computed_by": session.computed_by}
