"""The reference of an artefact: inputs and the trained model's answers, which any session can replay.

The streams of a reference start with empty memory and run well past the memory length in segments of 1, 7 and
T tokens. One row is restarted on the way. Restarts, segments and answers are all in the file, so replaying
needs no PyTorch. The reference of a language model holds log-probabilities, and the reference of any other
step its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import atomic_file, read_json
from runtimes.base.logits import are_log_probs, log_probability, log_sum_exp, output_differences
from runtimes.base.records import from_json, json_text, to_json
from runtimes.base.sealed import Count, read_verified
from runtimes.contract.model_facts import Positive, Size
from runtimes.contract.session import Session
from runtimes.contract.spec import ANSWERS, EXPORT_AGAIN, REFERENCE, SPEC, Spec

Kind = TypeVar("Kind", "Reference", "StepReference")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Tokens, how they are fed, and the answers to them: the reference of a language model."""

    tokens: np.ndarray  # int64 [B, N + 1]
    segments: np.ndarray  # int64: the lengths of the segments; their sum is N
    restarts: np.ndarray  # bool [segments, B]: the rows that start a new text at a segment
    log_probs: np.ndarray  # float32 [B, N]: of each next token
    last: np.ndarray  # float32 [B, V]: log-probabilities of every symbol after the last token


@dataclass(frozen=True, kw_only=True)
class StepReference:
    """Inputs, how they are fed, and the outputs: the reference of a step that is no language model."""

    inputs: dict[str, np.ndarray]
    """Inputs by name: [B, P, …], token n of a stream having the values at n mod P; [B, …] of a constant."""
    segments: np.ndarray  # int64: the lengths of the segments; their sum is N
    restarts: np.ndarray  # bool [segments, B]: the rows that start a new stream at a segment
    outputs: dict[str, np.ndarray]
    """Outputs by name: [B, N, …], or [B, segments, …] of an output without a value for each token."""


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """Where an array is: little-endian numbers of a file from byte `offset`, the last axis fastest."""

    file: Literal["reference.bin"]
    dtype: Literal["float32", "int64"]
    shape: tuple[Count, ...]
    offset: Count


@dataclass(frozen=True, kw_only=True)
class ReferenceFile:
    """`reference.json` of a language model; `Reference` describes the fields."""

    tokens: tuple[tuple[Size, ...], ...]
    segments: tuple[Positive, ...]
    restarts: tuple[tuple[bool, ...], ...]
    log_probs: StoredArray
    last: StoredArray


@dataclass(frozen=True, kw_only=True)
class StepReferenceFile:
    """`reference.json` of a step that is no language model; `StepReference` describes the fields."""

    segments: tuple[Positive, ...]
    restarts: tuple[tuple[bool, ...], ...]
    inputs: dict[str, StoredArray]
    outputs: dict[str, StoredArray]


def replay_step(
    session: Session, inputs: Mapping[str, np.ndarray], segments: Iterable[int], restarts: np.ndarray
) -> dict[str, np.ndarray]:
    """The outputs of a step over chained segments, in the shapes of `StepReference`.

    restarts: of these segments, and perhaps of more.
    """
    assert session.spec is not None, "only artefacts have references"
    fed, returned = session.spec.signature
    constants = {tensor.name for tensor in fed if "tokens" not in tensor.shape}
    pieces: dict[str, list[np.ndarray]] = {tensor.name: [] for tensor in returned}
    memory = session.start(restarts.shape[1])
    at = 0
    for length, restart in zip(segments, restarts, strict=False):
        memory.positions[restart] = 0
        tokens = at + np.arange(length)
        feed = {n: x if n in constants else x[:, tokens % x.shape[1]] for n, x in inputs.items()}
        outputs, memory = session.step(feed, memory)
        for tensor in returned:
            output = outputs[tensor.name]
            pieces[tensor.name].append(output if "tokens" in tensor.shape else output[:, None])
        at += length
    return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items()}


def step_differences(session: Session, reference: StepReference, segments: Iterable[int]) -> np.ndarray:
    """How far the outputs of a session are from a reference, as one list of numbers.

    segments: the lengths of all segments of the reference, or of the first ones.
    """
    assert session.spec is not None, "only artefacts have references"
    outputs = replay_step(session, reference.inputs, segments, reference.restarts)
    found = []
    for name in session.spec.compared_outputs:
        right = reference.outputs[name]
        mine = outputs[name]
        scale = session.spec.scale_of(right)
        found.append(output_differences(mine, right[:, : mine.shape[1]], scale=scale).ravel())
    return np.concatenate(found)


def replay(
    session: Session,
    tokens: np.ndarray,
    segments: Iterable[int],
    restarts: np.ndarray,
    *,
    lead: Iterable[int] = (),
    whole: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """log p of each next token [B, N], and of every symbol after the last token [B, V], over chained
    segments.

    lead: lengths of segments that are fed before; then all rows start a new text. whole: whether the answers
    are computed from the logits of all tokens, which graphs with a large vocabulary return only on request.
    """
    memory = session.start(len(tokens))
    taken = set(session.paths.taken) if session.paths else set()
    for length in lead:
        session.step(tokens[:, :length], memory)
    memory.positions[:] = 0
    if session.paths:
        session.paths.without(taken)  # nothing was compared
    pieces = []
    at = 0
    before_last = None
    for length, restart in zip(segments, restarts, strict=True):
        memory.positions[restart] = 0
        piece = tokens[:, at : at + length]
        if (
            at + length == tokens.shape[1] - 1
        ):  # the last segment is fed twice: it is scored, then predicted from
            before_last = memory.copy()
        targets = tokens[:, at + 1 : at + length + 1]
        if whole:
            logits, memory = session.step(piece, memory)
            log_probs = log_probability(logits, targets)
        else:
            log_probs, memory = session.score(piece, targets, memory)
        pieces.append(log_probs)
        at += length
    assert before_last is not None, "the segments do not end with the tokens"
    last, _ = session.predict(piece, before_last)
    return np.concatenate(pieces, axis=1), last - log_sum_exp(last)[:, None]


def save_reference(folder: Path, reference: Reference | StepReference) -> None:
    """Writes a reference as `reference.json` and `reference.bin`, which need no library to be read.

    Their keys are the fields of the reference; `_load` reads them.
    """
    fed = {"segments": reference.segments.tolist(), "restarts": reference.restarts.tolist()}
    if isinstance(reference, Reference):
        log_probs, last = _store(folder, [reference.log_probs, reference.last])
        document = {"tokens": reference.tokens.tolist(), **fed, "log_probs": log_probs, "last": last}
    else:
        stored = _store(folder, [*reference.inputs.values(), *reference.outputs.values()])
        inputs = dict(zip(reference.inputs, stored, strict=False))
        outputs = dict(zip(reference.outputs, stored[len(inputs) :], strict=True))
        document = {**fed, "inputs": inputs, "outputs": outputs}
    lines = [f"{json_text(name)}: {json_text(value)}" for name, value in document.items()]
    with atomic_file(folder / REFERENCE) as temporary:
        temporary.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n", encoding="utf-8")


def _store(folder: Path, arrays: Iterable[np.ndarray]) -> list[dict[str, Any]]:
    """Writes arrays one after the other into `reference.bin`; integers as int64, others as float32.

    Returns the `StoredArray` of each for `reference.json`.
    """
    stored = []
    offset = 0
    with atomic_file(folder / ANSWERS) as temporary, open(temporary, "wb") as stream:
        for array in arrays:
            dtype: Literal["float32", "int64"] = "int64" if array.dtype.kind == "i" else "float32"
            content = np.ascontiguousarray(array, ELEMENT_TYPES[dtype].stored).tobytes()
            stream.write(content)
            entry = StoredArray(file="reference.bin", dtype=dtype, shape=array.shape, offset=offset)
            stored.append(to_json(entry))
            offset += len(content)
    return stored


def load_step_reference(folder: Path, spec: Spec) -> StepReference:
    """`load_reference` for a step that is no language model."""
    reference = _load(StepReference, folder, spec)
    if not _fits(reference, spec):
        raise _no_reference(folder)
    return reference


def _fits(reference: StepReference, spec: Spec) -> bool:
    """Whether the arrays of a reference have the names, types and shapes of a step, and finite values."""
    segments = reference.segments
    steps = len(segments)
    batch = reference.restarts.shape[-1]
    if (segments.dtype, segments.ndim) != (np.int64, 1) or segments.min(initial=1) < 1:
        return False
    if (reference.restarts.dtype, reference.restarts.shape) != (bool, (steps, batch)):
        return False
    count = int(segments.sum())
    inputs, outputs = spec.signature
    for tensors, arrays in ((inputs[:-1], reference.inputs), (outputs, reference.outputs)):
        if [tensor.name for tensor in tensors] != list(arrays) or not count:
            return False
        for tensor, array in zip(tensors, arrays.values(), strict=True):
            timed = "tokens" in tensor.shape
            along = [count if timed else steps]
            if arrays is reference.inputs:  # they may repeat
                along = [min(array.shape[1], count)] if timed and array.ndim > 1 else []
            numbers = [size for size in tensor.shape[1:] if size != "tokens"]
            if array.shape != (batch, *along, *numbers) or array.dtype != tensor.dtype:
                return False
            if not (array.size and np.isfinite(array).all()):
                return False
    return True


def load_reference(folder: Path, spec: Spec) -> Reference:
    """The reference in the folder of an artefact or of an engine, its hashes, shapes and values checked.

    Raises ArtefactError if anything does not fit.
    """
    reference = _load(Reference, folder, spec)
    batch, length = reference.log_probs.shape if reference.log_probs.ndim == 2 else (0, 0)
    expected = {
        "tokens": ("int64", (batch, length + 1)),
        "segments": ("int64", reference.segments.shape[:1]),
        "restarts": ("bool", (*reference.segments.shape[:1], batch)),
        "log_probs": ("float32", (batch, length)),
        "last": ("float32", (batch, spec.model.vocab_size)),
    }
    found = {name: (array.dtype.name, array.shape) for name, array in vars(reference).items()}
    fits = found == expected and reference.log_probs.size and reference.segments.sum() == length
    tokens = reference.tokens
    if not fits or reference.segments.min() < 1 or tokens.min() < 0 or tokens.max() >= spec.model.vocab_size:
        raise _no_reference(folder)
    if not (are_log_probs(reference.log_probs) and are_log_probs(reference.last)):
        raise ArtefactError(
            f"{folder / REFERENCE} has answers that are not log-probabilities; export the artefact again."
        )
    return reference


def _load(kind: type[Kind], folder: Path, spec: Spec) -> Kind:
    """What `save_reference` wrote, its hashes verified; its arrays may have any types, shapes and values."""
    text, answers = (
        read_verified(folder / name, spec.files[name], record=SPEC, again=EXPORT_AGAIN)
        for name in (REFERENCE, ANSWERS)
    )
    document = read_json(folder / REFERENCE, text)
    file = ReferenceFile if kind is Reference else StepReferenceFile
    try:
        record = from_json(file, document, where=REFERENCE)
        return kind(**{name: _array(value, answers) for name, value in vars(record).items()})
    # Other keys or types, rows of several lengths, or an array that is not within the file of answers.
    except (ConfigError, ValueError) as error:
        raise _no_reference(folder) from error


def _array(value: Any, answers: bytes) -> Any:
    """The array of a value of `reference.json`, or arrays by name."""
    if isinstance(value, dict):
        return {name: _stored(entry, answers) for name, entry in value.items()}
    return _stored(value, answers) if isinstance(value, StoredArray) else np.array(value, ndmin=1)


def _stored(stored: StoredArray, answers: bytes) -> np.ndarray:
    """An array of `reference.bin`; no memory is taken before its size is known."""
    dtype = np.dtype(ELEMENT_TYPES[stored.dtype].stored)
    count = math.prod(stored.shape)
    if stored.offset + dtype.itemsize * count > len(answers):
        raise ValueError(f"{ANSWERS} has no such array")
    flat = np.frombuffer(answers, dtype, count, stored.offset)
    return flat.reshape(stored.shape).astype(dtype.newbyteorder("="))


def _no_reference(folder: Path) -> ArtefactError:
    return ArtefactError(
        f"{folder / REFERENCE} does not hold a reference of this model; export the artefact again."
    )
