"""The one protocol that every runtime speaks, and the checks of what is given to it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.files import read_npz
from runtimes.base.logits import log_probability
from runtimes.base.machine import memory_bytes
from runtimes.contract.memory import MAX_POSITION, Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import TensorFacts
from runtimes.contract.vocabulary import Vocab


class Session(Protocol):
    """A model that advances B streams segment by segment.

    identity: hash of what computes the numbers; memory belongs to exactly one identity.
    state: the memory tensors, with "batch" as their named axis.
    """

    identity: str
    rule: MemoryRule
    vocab: Vocab
    state: tuple[TensorFacts, ...]

    def start(self, batch: int) -> Memory:
        """Memory of `batch` new streams, all at position 0."""
        ...

    # Each of the three feeds one segment, tokens int64 [B, T], and returns the memory after it. The memory is
    # updated in place: it is the caller's, and `memory.copy()` forks it. They raise StreamError, with the memory
    # unchanged, for tokens, batch or memory that do not fit.

    def step(self, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        """Logits float32 [B, T, V] of the token after each one here."""
        ...

    def predict(self, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        """Logits float32 [B, V] of the token after the last one here."""
        ...

    def score(self, tokens: np.ndarray, targets: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        """log p(target) float32 [B, T], nats, of targets int64 [B, T]; 0 where a target is -1, not wanted."""
        ...


class FromLogits:
    """`predict` and `score` for a session whose `step` gives all logits: what vocabularies of moderate size need."""

    def predict(self: Session, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        logits, memory = self.step(tokens, memory)
        return logits[:, -1], memory

    def score(
        self: Session, tokens: np.ndarray, targets: np.ndarray, memory: Memory
    ) -> tuple[np.ndarray, Memory]:
        targets = checked_targets(self, targets, tokens)
        logits, memory = self.step(tokens, memory)
        return log_probability(logits, targets), memory


def new_memory(session: Session, batch: int) -> Memory:
    """Zero arrays for `batch` rows; raises StreamError for an impossible batch."""
    if not 1 <= batch <= 1 << 16:
        raise StreamError(f"batch is {batch}; expected 1 to {1 << 16} rows.")
    needed = batch * sum(tensor.num_bytes(batch=1) for tensor in session.state)
    if needed > memory_bytes():
        raise StreamError(
            f"the memory of {batch} streams takes {needed / 2**30:,.0f} GiB and this machine has "
            f"{memory_bytes() / 2**30:.0f}; use a smaller batch."
        )
    tensors = {tensor.name: np.zeros(tensor.sizes(batch=batch), tensor.dtype) for tensor in session.state}
    return Memory(np.zeros(batch, np.int64), tensors, session.identity)


def checked_targets(session: Session, targets: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`targets` as a contiguous int64 array of the shape of `tokens`; raises StreamError where they do not fit."""
    targets = np.asarray(targets)
    if targets.shape != np.shape(tokens) or targets.dtype.kind not in "iu":
        raise StreamError(
            f"targets are {targets.dtype} {list(targets.shape)}; expected integers {list(np.shape(tokens))}."
        )
    if targets.size and (targets.min() < -1 or targets.max() >= session.vocab.size):
        raise StreamError(
            f"a target is outside the vocabulary; expected -1 (not wanted) to {session.vocab.size - 1}."
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
            f"the memory belongs to artefact {memory.owner:.12} and this session runs {session.identity:.12}; "
            "use memory that this session's start() returned."
        )
    check_memory(session, memory)
    if batch != memory.batch:
        raise StreamError(
            f"tokens have {batch} rows and the memory holds {memory.batch} streams; give one row per stream."
        )
    if not 1 <= segment <= session.rule.segment:
        raise StreamError(
            f"the segment has {segment} tokens; this artefact takes 1 to {session.rule.segment}: "
            "feed it in pieces, or export it with a larger --segment."
        )
    if tokens.min() < 0 or tokens.max() >= session.vocab.size:
        raise StreamError(
            f"token {tokens.max() if tokens.max() >= session.vocab.size else tokens.min()} is outside the vocabulary; "
            f"expected 0 to {session.vocab.size - 1}."
        )
    return np.ascontiguousarray(tokens, np.int64)


def load_memory(path: Path | str, session: Session) -> Memory:
    """The streams in a file that `save_memory` wrote, for the session's own artefact.

    Raises StreamError when they belong to another artefact, ArtefactError when the file is damaged.
    """
    arrays = read_npz(Path(path))
    if not {"owner", "positions"} <= set(arrays):
        raise ArtefactError(f"{path} holds no stream memory; expected a file written by save_memory.")
    owner, positions = str(arrays.pop("owner")), arrays.pop("positions")
    if owner != session.identity:
        raise StreamError(
            f"{path} holds memory of the artefact {owner:.12}, and this one is {session.identity:.12}; "
            "open the artefact that the stream was started on, or start a new stream."
        )
    tensors = {  # in this machine's layout, whatever the file's
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
    """Raises StreamError where a memory's arrays are not those of the session: names, types, shapes, positions."""
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
            f"the memory's positions reach beyond {MAX_POSITION}; set them to 0 to start new texts."
        )
    expected = {tensor.name: (tensor.sizes(batch=len(positions)), tensor.dtype) for tensor in session.state}
    if {name: (array.shape, array.dtype.name) for name, array in memory.tensors.items()} != expected:
        raise StreamError(
            "the memory's arrays are not those of this session (names, types, shapes); use memory from start() or load_memory()."
        )
