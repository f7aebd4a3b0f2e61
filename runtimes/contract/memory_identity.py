"""What decides whether a model continues a stream: the layout of its memory and the weights behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from runtimes.base.records import json_text, to_json
from runtimes.base.sealed import SHA256

if TYPE_CHECKING:
    from runtimes.contract.rule import MemoryRule
    from runtimes.contract.tensors import AnyForm, TensorSpec
    from runtimes.contract.vocabulary import Vocab


@dataclass(frozen=True, kw_only=True)
class MemoryIdentity:
    """The identity of a memory, which does not depend on the precision or on the version that exported it.

    A stream continues in every artefact, engine or run of the same memory identity.
    """

    layout: Annotated[str, SHA256]
    """Hash of what the numbers of a memory mean (`layout_of`)."""
    weights: Annotated[str, SHA256]
    """Hash of the trained weights, before their precision was reduced: the one in `Spec.source`."""


class Owner(NamedTuple):
    """The artefact, engine or run whose session made a memory."""

    artefact: str
    """Identity of the artefact. Only sessions with this identity step the memory."""
    memory: MemoryIdentity
    """What decides whether another session may load the memory from a file."""


def layout_of(
    state: Iterable[TensorSpec],
    rule: MemoryRule,
    form: AnyForm,
    vocab: Vocab | None,
    *,
    moves_every: int | None = None,
    heads: Sequence[Sequence[int]] = (),
) -> str:
    """The hash of a memory's layout: the names and shapes of its tensors, the rule, the form and the
    vocabulary.

    heads: the heads of each group, if learned spans decide their order.

    Element types are left out, and so are the scales of int8 memory: `load_memory` converts them.
    """
    facts: dict[str, Any] = {
        "tensors": [[tensor.name, tensor.row] for tensor in state if not tensor.is_scale],
        "rule": to_json(rule),
        "form": form,
        "moves_every": moves_every,
        "vocabulary": None if vocab is None else vocab.to_json(),
    }
    if heads:
        facts["heads"] = [list(group) for group in heads]
    return hashlib.sha256(json_text(facts, sort_keys=True).encode()).hexdigest()
