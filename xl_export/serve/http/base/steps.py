"""Steps of the model for a client that names inputs and outputs, as tasks of the engine.

A model with named inputs has no other requests. The input of a language model is its token ids, and its
output the logits after each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.contract.checks import checked_ids, fitting_inputs, tokens_by_name
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.tensors import MAX_AXES, POSITIONS, Signature, TensorSpec
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Arrays, PromptFed, Task
from xl_export.serve.http.base.errors import RefusedError

MAX_LOGITS = 1 << 22  # numbers of one answer: 16 MB of arrays, or about 80 MB of JSON


def step_signature(session: Session) -> Signature:
    """The inputs and outputs of a step, without the positions, which the session adds."""
    if not is_language_model(session):
        assert session.spec is not None, "only artefacts name their inputs"
        inputs, outputs = session.spec.signature
        return tuple(tensor for tensor in inputs if tensor.name != POSITIONS), outputs
    size = session.vocab.size
    tokens = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "tokens"), ids=size)
    return (tokens,), (TensorSpec(name="logits", dtype="float32", shape=("batch", "tokens", size)),)


def step_task(session: Session, given: Mapping[str, Any], state: StreamState, owner: str = "") -> Task:
    """The task of one step of a stream.

    given: arrays or nested lists by name, with a batch of one. Raises StreamError or RefusedError for inputs
    that do not fit.
    """
    inputs = {name: as_numbers(name, each) for name, each in given.items()}
    if not is_language_model(session):
        assert session.spec is not None, "only artefacts name their inputs"
        arrays = fitting_inputs(session, session.spec, inputs, state.memory)
        return Task(inputs=arrays, state=state, keep=True, owner=owner)
    ids = tokens_by_name(inputs)
    if ids.ndim != 2 or len(ids) != 1 or not ids.size:
        raise RefusedError(
            f"input_ids has the shape {list(ids.shape)}; expected [1, n] for n tokens.", param="inputs"
        )
    most = max(session.rule.segment, MAX_LOGITS // session.vocab.size)
    if ids.size > most:
        raise RefusedError(
            f"input_ids has {ids.size:,} tokens, and an answer holds the logits after {most:,} at most; send "
            "the others in another request of the sequence.",
            param="inputs",
        )
    tokens = checked_ids(ids[0], session.vocab.size, what="input_ids")
    return Task(tokens=tokens, state=state, logits=True, keep=True, owner=owner)


class StepOutputs:
    """Collects the outputs of a step from the answers to its task."""

    def __init__(self) -> None:
        self._chunks: list[Arrays] = []

    def note(self, answer: Answer) -> None:
        """Adds what an answer has."""
        if isinstance(answer, PromptFed) and answer.outputs is not None:
            self._chunks.append(answer.outputs)

    def take(self) -> Arrays:
        """All outputs by name."""
        first, *others = self._chunks
        if not others:
            return first
        return {name: np.concatenate([each[name] for each in self._chunks], axis=1) for name in first}


def refuse_not_finite(state: StreamState) -> None:
    """Raises StreamError for a stream that a step with named inputs has spoilt; its outputs may not show it.

    Other numbers than these are certain then.
    """
    if not all(np.isfinite(array).all() for array in state.memory.tensors.values()):
        raise StreamError(
            "the step has made numbers that are not finite, and the stream stays as it was; give smaller "
            "inputs, or train the model again."
        )
    state.memory.unsure = False


def as_numbers(name: str, given: Any) -> np.ndarray:
    """Nested lists of numbers as an array; raises StreamError for anything else. NumPy would make arrays of
    texts, too, in which each takes the memory of the longest.
    """
    if isinstance(given, np.ndarray):
        return given
    values = [given]
    for _ in range(MAX_AXES + 1):
        kinds = set(map(type, values))
        if kinds <= {int, float}:
            try:
                return np.asarray(given)
            except ValueError:  # lists of unequal length
                break
        if kinds != {list}:
            break
        values = list(itertools.chain.from_iterable(values))
    raise StreamError(f"{name:.60} is no array of numbers; give numbers in nested lists of equal length.")
