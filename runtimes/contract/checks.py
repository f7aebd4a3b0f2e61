"""Checks of what a session is given: tokens, targets and memory. They run before anything is computed."""

from __future__ import annotations

import os
from mmap import mmap
from typing import Any

import numpy as np

from runtimes.base.errors import StreamError, TextError
from runtimes.base.ranges import counted
from runtimes.contract.memory import (
    MAX_POSITION,
    DeviceTensor,
    Memory,
    refuse_batch,
    zeros,
)
from runtimes.contract.memory_identity import Owner
from runtimes.contract.promises import refuse_unpromised
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import row_bytes


def owner_of(session: Session) -> Owner:
    """The owner of the memories of a session."""
    return Owner(session.identity, session.memory_identity)


def new_memory(session: Session, batch: int) -> Memory:
    """A memory of zeros for `batch` streams at position 0; raises StreamError for an impossible batch."""
    refuse_batch(batch, row_bytes=row_bytes(session.state))
    tensors = {tensor.name: zeros((batch, *tensor.row), tensor.dtype) for tensor in session.state}
    memory = Memory(np.zeros(batch, np.int64), tensors, owner_of(session))
    memory.unsure = False
    return memory


def checked_targets(
    session: Session, targets: np.ndarray, tokens: np.ndarray, lengths: np.ndarray | None = None
) -> np.ndarray:
    """`targets` as a contiguous int64 array of the shape of `tokens`; raises StreamError if they do not
    fit, and where one is wanted beyond the length of its row.
    """
    targets = as_array(targets)
    wanted = as_array(tokens).shape
    if targets.shape != wanted or targets.dtype.kind not in "iu":
        raise StreamError(
            f"targets are {targets.dtype} {list(targets.shape)}; expected integers {list(wanted)}."
        )
    last = session.vocab.size - 1
    if (outside := value_outside(targets, -1, last)) is not None:
        raise StreamError(
            f"target {outside} is outside the vocabulary; expected -1 (which means not wanted) to {last}."
        )
    if lengths is not None and (checked := checked_lengths(lengths, tokens)) is not None:
        beyond = np.argwhere((targets >= 0) & (np.arange(targets.shape[1]) >= checked[:, None]))
        if len(beyond):
            row, at = beyond[0]
            raise StreamError(
                f"row {row} has length {checked[row]} and wants the target at index {at}, after padding; "
                "give -1 there."
            )
    return np.ascontiguousarray(targets, np.int64)


def checked_ids(ids: Any, size: int, *, what: str) -> np.ndarray:
    """Token ids of a vocabulary of this size as int64 [N], which may be empty; raises TextError for others.

    what: a name of the ids, for messages.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # lists of unequal length, or integers of any size
        array = np.array(None)
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TextError(f"{what} is neither a text nor a list of token ids; give one of them.")
    if (outside := value_outside(array, 0, size - 1)) is not None:
        raise TextError(
            f"{what} has the token id {outside}, outside the vocabulary of this model (0 to {size - 1}); "
            "give ids of this model, or a text."
        )
    return array.astype(np.int64)


def checked_lengths(lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
    """`lengths` as an int64 array [B] for tokens [B, T]; None if every row has all of its tokens.

    Raises StreamError if they do not fit.
    """
    if np.ndim(tokens) != 2:  # such tokens are refused by `checked_tokens`
        return None
    given = as_array(lengths)
    batch, segment = np.shape(tokens)
    if given.shape != (batch,) or given.dtype.kind not in "iu":
        raise StreamError(
            f"lengths are {given.dtype} {list(given.shape)}; expected integers [{batch}], one for each row."
        )
    if (wrong := np.flatnonzero((given < 0) | (given > segment))).size:
        row = wrong[0]
        raise StreamError(
            f"row {row} has length {given[row]}; expected 0 to {segment}, the tokens of this segment."
        )
    return None if (given == segment).all() else given.astype(np.int64)


def last_fed(lengths: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    """The index [B] of the last token that is fed in each row of tokens [B, T]; 0 in a row of length 0.

    lengths: they fit the tokens, or are None.
    """
    batch, segment = np.shape(tokens)
    counts = np.full(batch, segment) if lengths is None else np.asarray(lengths, np.int64)
    last: np.ndarray = np.maximum(counts, 1) - 1
    return last


def checked_tokens(session: Session, tokens: np.ndarray, memory: Memory) -> np.ndarray:
    """`tokens` as a contiguous int64 array [B, T]; raises StreamError if they or the memory do not fit."""
    tokens = as_array(tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise StreamError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}; expected integers [batch, segment]."
        )
    _refuse_foreign(session, memory)
    _refuse_unfit(session, memory, *tokens.shape)
    last = session.vocab.size - 1
    if (outside := value_outside(tokens, 0, last)) is not None:
        raise StreamError(f"token {outside} is outside the vocabulary; expected 0 to {last}.")
    return np.ascontiguousarray(tokens, np.int64)


def tokens_by_name(inputs: dict[str, Any]) -> Any:
    """The tokens of a language model whose inputs are given by name; raises StreamError for other names."""
    if set(inputs) != {"input_ids"}:
        raise StreamError(f"the inputs are {sorted(map(str, inputs))!s:.200}; expected only input_ids.")
    return inputs["input_ids"]


def checked_inputs(session: Session, spec: Spec, inputs: Any, memory: Memory) -> dict[str, np.ndarray]:
    """The inputs of a step that is no language model, as contiguous arrays of the types of the spec.

    Raises StreamError if they or the memory do not fit.
    """
    _refuse_foreign(session, memory)
    return fitting_inputs(session, spec, inputs, memory)


def fitting_inputs(session: Session, spec: Spec, inputs: Any, memory: Memory) -> dict[str, np.ndarray]:
    """The same for a memory that is known to be one of the session's; raises StreamError if the inputs do
    not fit.
    """
    wanted = spec.signature[0][:-1]  # the session adds the positions
    names = [tensor.name for tensor in wanted]
    if not isinstance(inputs, dict) or sorted(inputs, key=str) != sorted(names):
        given = sorted(map(str, inputs)) if isinstance(inputs, dict) else f"of type {type(inputs).__name__}"
        raise StreamError(
            f"the inputs are {given!s:.200}; expected a dict with an array for each of {names}."
        )
    arrays = {}
    segment: int | None = None
    for tensor in wanted:
        array = as_array(inputs[tensor.name])
        kinds = "iu" if tensor.ids is not None else "fiu"
        known = [
            memory.batch if size == "batch" else segment if size == "tokens" else size
            for size in tensor.shape
        ]
        fits = array.ndim == len(known) and all(
            want is None or have == want for have, want in zip(array.shape, known, strict=True)
        )
        if not fits or array.dtype.kind not in kinds:
            shown = [
                str(name if size is None else size) for size, name in zip(known, tensor.shape, strict=True)
            ]
            raise StreamError(
                f"{tensor.name} is {array.dtype} {list(array.shape)}; expected {tensor.dtype} "
                f"[{', '.join(shown)}]."
            )
        if "tokens" in tensor.shape:
            segment = array.shape[1]
        if tensor.ids is not None and (outside := value_outside(array, 0, tensor.ids - 1)) is not None:
            raise StreamError(f"{tensor.name} has the id {outside}; expected 0 to {tensor.ids - 1}.")
        if array.dtype == tensor.dtype:  # the usual case; `errstate` takes longer than the cast
            arrays[tensor.name] = np.ascontiguousarray(array)
        else:
            with np.errstate(over="ignore"):
                arrays[tensor.name] = np.ascontiguousarray(array, tensor.dtype)
        if tensor.ids is None and not np.isfinite(arrays[tensor.name]).all():
            raise StreamError(
                f"{tensor.name} has a number that is not finite in float32, and every later answer of the "
                "stream would be NaN; replace it, or leave the step out."
            )
    assert segment is not None, "`refuse_signature` demands an input with a value for each token"
    _refuse_unfit(session, memory, memory.batch, segment)
    return arrays


def as_array(values: Any) -> np.ndarray:
    """Values of a caller as an array: an empty one of objects for nested lists of unequal length."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty(0, object)


def _refuse_foreign(session: Session, memory: Memory) -> None:
    """Raises StreamError if a memory is not one of the session's."""
    if memory.owner.artefact != session.identity:
        raise StreamError(
            f"the memory belongs to artefact {memory.owner.artefact:.12} and this session runs "
            f"{session.identity:.12}; use memory that this session's start() returned."
        )
    check_memory(session, memory)


def _refuse_unfit(session: Session, memory: Memory, batch: int, segment: int) -> None:
    """Raises StreamError if a step of this many rows and tokens does not fit the session or the memory."""
    if batch != memory.batch:
        raise StreamError(
            f"tokens have {counted(batch, 'row')} and the memory holds {counted(memory.batch, 'stream')}; "
            "give one row per stream."
        )
    if segment == 0:
        raise StreamError("the segment has 0 tokens; give at least one in each row.")
    if segment > session.rule.segment:
        raise StreamError(
            f"the segment has {segment} tokens; this artefact takes at most {session.rule.segment}: "
            "feed them in several pieces, or export it with a larger segment."
        )
    if session.spec is None:
        return
    if session.spec.without:
        refuse_unpromised(session.spec.without, memory.positions, session.rule.segment)
    fixed = session.spec.fixed_rows
    any_count = bool(session.spec.fixed_tokens)
    if fixed is not None and (batch != fixed or not (any_count or segment == session.rule.segment)):
        raise StreamError(
            f"the step has {counted(batch, 'row')} of {counted(segment, 'token')}, and this artefact was "
            f"exported for exactly {counted(fixed, 'row')} of {'at most ' * any_count}"
            f"{session.rule.segment}; feed that, or export it without `rows`."
        )


def value_range(values: np.ndarray) -> tuple[int, int]:
    """The lowest and the highest of some integers; (0, 0) if there are none."""
    if values.size == 1:
        value = values.item()
        return value, value
    if values.size > 64:
        return int(values.min()), int(values.max())
    few = values.ravel().tolist()  # several times faster than NumPy's reductions, for each token
    return min(few, default=0), max(few, default=0)


def value_outside(values: np.ndarray, least: int, most: int) -> int | None:
    """One of some integers that is not from `least` to `most`; None if all are."""
    lowest, highest = value_range(values)
    return highest if highest > most else lowest if lowest < least else None


def check_memory(session: Session, memory: Memory) -> None:
    """Raises StreamError if a memory's arrays or its positions do not fit the session.

    Names, types in this machine's byte order, and shapes must be the session's. Every array must be writeable
    and hold its own bytes, because a step writes into it: a view or a map of a file would change something
    else, or end the process.
    """
    if memory.whole is not None:
        if not memory.current:
            raise StreamError(
                "the arrays of the memory that this part belongs to were exchanged; ask for the part again."
            )
        check_memory(session, memory.whole)
        return
    positions = memory.positions
    tensors = memory.tensors
    state = session.state
    is_array = isinstance(positions, np.ndarray) and positions.dtype == np.int64
    if not is_array or positions.ndim != 1 or not positions.size:
        raise StreamError(
            "the memory's positions are not an int64 array [batch]; use memory from start() or load_memory()."
        )
    if not isinstance(tensors, dict) or tensors.keys() != {tensor.name for tensor in state}:
        raise StreamError(
            "the memory's arrays do not have the names of this session; use memory from start() or "
            "load_memory()."
        )
    for name, array in [("positions", positions), *tensors.items()]:
        if isinstance(array, DeviceTensor):
            continue
        # A step writes into the array. A base that holds its bytes may be a buffer of another library.
        is_own = isinstance(array, np.ndarray) and not isinstance(array, np.memmap) and array.flags.carray
        if not is_own or isinstance(array.base, np.ndarray | bytes | memoryview | mmap):
            raise StreamError(
                f"the memory's array {name} is read-only, a view of another array, or no array; put a copy "
                "of it in its place."
            )
    if value_outside(positions, -MAX_POSITION, MAX_POSITION) is not None:
        raise StreamError(
            f"the memory's positions are beyond {MAX_POSITION}; set them to 0 to start new texts."
        )
    batch = positions.shape
    for tensor in state:
        array = tensors[tensor.name]
        if array.shape[:1] != batch or array.shape[1:] != tensor.shape[1:] or array.dtype != tensor.dtype:
            raise StreamError(
                f"the memory's array {tensor.name} is {array.dtype.str} {list(array.shape)} and this session "
                f"takes {tensor.dtype} {[*batch, *tensor.row]}; use memory from start() or load_memory()."
            )


def refuse_after_fork(process: int) -> None:
    """Raises StreamError in a child process that was forked after its session was opened in `process`."""
    if os.getpid() != process:
        raise StreamError(
            "this session was opened before the process was forked, and its threads do not exist in the "
            'copy; open the folder in each child, and start children with multiprocessing\'s "spawn".'
        )
