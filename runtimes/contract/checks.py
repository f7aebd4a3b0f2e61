"""Checks of what a session is given: tokens, targets and memory. They run before anything is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.files import read_npz
from runtimes.base.machine import refuse_beyond_memory
from runtimes.contract.memory import MAX_POSITION, Memory
from runtimes.contract.session import Session

MAX_BATCH = 1 << 16  # rows


def new_memory(session: Session, batch: int) -> Memory:
    """A memory of zeros for `batch` streams at position 0; raises StreamError for an impossible batch."""
    if not 1 <= batch <= MAX_BATCH:
        raise StreamError(f"batch is {batch}; expected 1 to {MAX_BATCH} rows.")
    needed = batch * sum(tensor.num_bytes(batch=1) for tensor in session.state)
    refuse_beyond_memory(needed, what=f"the memory of {batch} streams", mend="use a smaller batch")
    tensors = {tensor.name: np.zeros(tensor.sizes(batch=batch), tensor.dtype) for tensor in session.state}
    return Memory(np.zeros(batch, np.int64), tensors, session.identity)


def checked_targets(session: Session, targets: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`targets` as a contiguous int64 array of the shape of `tokens`; raises StreamError where they do not
    fit.
    """
    targets = np.asarray(targets)
    if targets.shape != np.shape(tokens) or targets.dtype.kind not in "iu":
        raise StreamError(
            f"targets are {targets.dtype} {list(targets.shape)}; expected integers {list(np.shape(tokens))}."
        )
    if targets.size and (targets.min() < -1 or targets.max() >= session.vocab.size):
        raise StreamError(
            "a target is outside the vocabulary; expected -1 (which means not wanted) to "
            f"{session.vocab.size - 1}."
        )
    return np.ascontiguousarray(targets, np.int64)


def checked_tokens(session: Session, tokens: np.ndarray, memory: Memory) -> np.ndarray:
    """`tokens` as a contiguous int64 array [B, T]; raises StreamError where they or the memory do not fit."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise StreamError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}; expected integers [batch, segment]."
        )
    batch, segment = tokens.shape
    if memory.owner != session.identity:
        raise StreamError(
            f"the memory belongs to artefact {memory.owner:.12} and this session runs "
            f"{session.identity:.12}; use memory that this session's start() returned."
        )
    check_memory(session, memory)
    if batch != memory.batch:
        raise StreamError(
            f"tokens have {batch} rows and the memory holds {memory.batch} streams; give one row per stream."
        )
    if not 1 <= segment <= session.rule.segment:
        raise StreamError(
            f"the segment has {segment} tokens; this artefact takes 1 to {session.rule.segment}: "
            "feed them in several pieces, or export it with a larger --segment."
        )
    if tokens.min() < 0 or tokens.max() >= session.vocab.size:
        outside = tokens.max() if tokens.max() >= session.vocab.size else tokens.min()
        raise StreamError(
            f"token {outside} is outside the vocabulary; expected 0 to {session.vocab.size - 1}."
        )
    return np.ascontiguousarray(tokens, np.int64)


def load_memory(path: Path | str, session: Session) -> Memory:
    """The memory in a file that `save_memory` wrote, ready for the session to continue its streams.

    Raises StreamError where the streams belong to another artefact, ArtefactError where the file is damaged.
    """
    arrays = read_npz(Path(path))
    if not {"owner", "positions"} <= set(arrays):
        raise ArtefactError(f"{path} holds no stream memory; expected a file written by save_memory.")
    owner, positions = str(arrays.pop("owner")), arrays.pop("positions")
    if owner != session.identity:
        raise StreamError(
            f"{path} holds the memory of artefact {owner:.12}, and this session runs {session.identity:.12}; "
            "open the artefact that the stream was started on, or start a new stream."
        )
    tensors = {  # in the byte order of this machine, whatever that of the file
        name.removeprefix("tensor/"): np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        for name, array in arrays.items()
    }
    memory = Memory(positions, tensors, owner)
    try:
        check_memory(session, memory)
    except StreamError as error:
        raise ArtefactError(f"{path} is damaged: {error}") from error
    if not all(np.isfinite(array).all() for array in tensors.values()):
        raise ArtefactError(f"{path} is damaged: it holds values that are not finite; start a new stream.")
    return memory


def check_memory(session: Session, memory: Memory) -> None:
    """Raises StreamError where names, types or shapes of a memory's arrays, or its positions, do not fit the
    session.
    """
    positions = memory.positions
    if (
        not isinstance(positions, np.ndarray)
        or positions.dtype != np.int64
        or positions.ndim != 1
        or len(positions) == 0
    ):
        raise StreamError(
            "the memory's positions are not an int64 array [batch]; use memory from start() or load_memory()."
        )
    if np.abs(positions).max() > MAX_POSITION or positions.min() < -MAX_POSITION:
        raise StreamError(
            f"the memory's positions are beyond {MAX_POSITION}; set them to 0 to start new texts."
        )
    expected = {tensor.name: (tensor.sizes(batch=len(positions)), tensor.dtype) for tensor in session.state}
    if {name: (array.shape, array.dtype.name) for name, array in memory.tensors.items()} != expected:
        raise StreamError(
            "the memory's arrays are not those of this session (names, types, shapes); "
            "use memory from start() or load_memory()."
        )
