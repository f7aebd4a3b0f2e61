"""The paths of an engine, by name: what its self-test has to compare before it may pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from runtimes.contract.engine import EngineFacts, Profile
from runtimes.contract.session import Paths
from runtimes.contract.spec import Spec

CAPTURED = "launched as a CUDA graph"
PLAIN = "run without a graph"
ALL = "logits of all tokens"
LAST = "logits of the last tokens"


def directions(spec: Spec) -> tuple[str, ...]:
    """How a step may read and write the memory: a ring in place, shift memory in two directions."""
    return ("in place",) if spec.linear_ring else ("from the first buffers", "from the second buffers")


def path_name(
    spec: Spec, profile: Profile, how: str, direction: str, inputs: Mapping[str, np.ndarray]
) -> str:
    """The path of one step with these inputs."""
    batch, length = inputs["input_ids"].shape
    logits = None
    if spec.model.selective and profile.tokens[2] > 1:
        logits = ALL if length > 1 and len(inputs["logit_rows"]) == batch * length else LAST
    return _name(profile, how, direction, logits)


def engine_paths(facts: EngineFacts, spec: Spec, *, captured: Collection[str]) -> Paths:
    """Every path of an engine, and the batches that reach them.

    captured: the names of the profiles whose steps the session captures as CUDA graphs.
    """
    profiles = [profile for profile in facts.profiles if not _hidden(profile, facts.profiles)]
    names = [
        _name(profile, how, direction, logits)
        for profile in profiles
        for how in (PLAIN, *([CAPTURED] if profile.name in captured else []))
        for direction in directions(spec)
        for logits in ((LAST, ALL) if spec.model.selective and profile.tokens[2] > 1 else (None,))
        if not (
            how == PLAIN
            and direction != directions(spec)[0]
            and profile.name in captured
            and _alone(profile, profiles)
        )
    ]
    # Two rows if the profile allows them, to show that rows are independent.
    batches = [min(max(2, profile.batch[0]), profile.batch[2]) for profile in profiles]
    return Paths(possible=tuple(names), batches=tuple(dict.fromkeys(batches)))


def _hidden(profile: Profile, profiles: tuple[Profile, ...]) -> bool:
    """Whether another profile accepts every step that this one accepts: then this one is never chosen."""
    later = profiles[profiles.index(profile) + 1 :]
    return profile.tokens[2] == 1 and any(
        other.batch[0] <= profile.batch[0] and profile.batch[2] <= other.batch[2] for other in later
    )


def _alone(profile: Profile, profiles: list[Profile]) -> bool:
    """Whether a stream has only steps of this profile, of one shape: then only its first is not captured."""
    others = [other for other in profiles if other is not profile]
    size = profile.batch[0]
    return profile.batch == (size,) * 3 and not any(o.batch[0] <= size <= o.batch[2] for o in others)


def _name(profile: Profile, how: str, direction: str, logits: str | None) -> str:
    return ", ".join([f"profile {profile.name}", how, direction, *([logits] if logits else [])])
