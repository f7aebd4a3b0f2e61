"""The one protocol that every runtime speaks, and how to open the right one for a folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np

from runtimes.engine import BUILD
from runtimes.errors import ArtefactError, StreamError
from runtimes.logits import log_probability
from runtimes.machine import memory_bytes
from runtimes.memory import Memory, check_memory
from runtimes.rule import MemoryRule
from runtimes.spec import SPEC, TensorFacts
from runtimes.vocab import Vocab

# The file that marks a folder's kind, and the session class for it: each is imported only when needed.
SESSIONS = {
    BUILD: ("runtimes.trt_session", "TrtSession"),  # before SPEC, which an engine has too
    SPEC: ("runtimes.ort_session", "OrtSession"),
    "config.json": ("runtimes.torch_session", "TorchSession"),
}

MAX_THREADS = 1024


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

    def score(self: Session, tokens: np.ndarray, targets: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        targets = checked_targets(self, targets, tokens)
        logits, memory = self.step(tokens, memory)
        return log_probability(logits, targets), memory


def open_session(path: Path | str, *, threads: int | None = None) -> Session:
    """A session for an artefact (ONNX Runtime), an engine (TensorRT) or a run folder (PyTorch, needs `xl-export[train]`).

    threads: CPU threads, all that this process may use when None; PyTorch has one number for the whole process, and an
    engine takes none.
    Raises ArtefactError for a folder that is neither or is damaged, StreamError for an impossible number of threads.
    """
    folder = Path(path)
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise StreamError(f"threads is {threads}; expected 1 to {MAX_THREADS}.")
    if not folder.is_dir():
        raise ArtefactError(
            f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; give a run, an artefact or an engine."
        )
    for marker, (module, name) in SESSIONS.items():
        if (folder / marker).is_file():
            session: Session = getattr(import_module(module), name).open(folder, threads=threads)
            return session
    raise ArtefactError(
        f"{folder} is neither an artefact (it has no {SPEC}) nor a run (it has no config.json) nor an engine (no {BUILD}); "
        "make them with `xl-export train`, `xl-export onnx` and `xl-export tensorrt`."
    )


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
        raise StreamError(f"targets are {targets.dtype} {list(targets.shape)}; expected integers {list(np.shape(tokens))}.")
    if targets.size and (targets.min() < -1 or targets.max() >= session.vocab.size):
        raise StreamError(f"a target is outside the vocabulary; expected -1 (not wanted) to {session.vocab.size - 1}.")
    return np.ascontiguousarray(targets, np.int64)


def checked_tokens(session: Session, tokens: np.ndarray, memory: Memory) -> np.ndarray:
    """`tokens` as a contiguous int64 array [B, T]; raises StreamError where they or the memory do not fit."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise StreamError(f"tokens are {tokens.dtype} {list(tokens.shape)}; expected integers [batch, segment].")
    batch, segment = tokens.shape
    if memory.owner != session.identity:
        raise StreamError(
            f"the memory belongs to artefact {memory.owner:.12} and this session runs {session.identity:.12}; "
            "use memory that this session's start() returned."
        )
    check_memory(session, memory)
    if batch != memory.batch:
        raise StreamError(f"tokens have {batch} rows and the memory holds {memory.batch} streams; give one row per stream.")
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
