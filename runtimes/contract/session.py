"""The session protocol: the whole contract between the tasks and what computes a step.

A task (`runtimes/tasks`), a command or a benchmark uses a session only through these members. It never checks
the class of a session. A new runtime is one class with these members, one line in
`runtimes/sessions/open.py` and one line in the kinds of the contract test, `tests/session_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtimes.contract.device import AUTO, Device
from runtimes.contract.memory import Memory
from runtimes.contract.memory_identity import MemoryIdentity
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import TensorSpec
from runtimes.contract.vocabulary import Vocab


@dataclass
class Paths:
    """How a session can compute a step. Each path has kernels, buffers or a captured graph of its own."""

    possible: tuple[str, ...]  # all of them, in words for people
    batches: tuple[int, ...]  # numbers of rows that together reach every path
    taken: set[str] = field(default_factory=set)  # the paths that steps have used in this session

    @property
    def missing(self) -> tuple[str, ...]:
        """The paths that no step has used."""
        return tuple(path for path in self.possible if path not in self.taken)

    def without(self, before: Iterable[str]) -> None:
        """Forgets the steps since `before`, a copy of `taken`: their answers were compared with nothing."""
        self.taken = set(before)


class Session(Protocol):
    """A model that advances B streams segment by segment."""

    identity: str
    """The hash of everything that determines the numbers. A memory in use belongs to exactly one identity."""
    rule: MemoryRule
    """The memory rule that the session computes under."""
    state: tuple[TensorSpec, ...]
    """The memory tensors; "batch" is their named axis."""
    pads_right: bool
    """Whether tokens change no answer to the tokens before them in their segment, so that a row may end in
    padding. They do if positions count from the end of the segment.
    """
    sampler: Sampler
    """The sampling settings that the model recommends; `generate` uses them by default."""
    before_run: Callable[[], object] | None
    """Called in each step when everything is prepared and the computation begins, more than once if the step
    is computed in pieces, and not if the step is refused. Set it to hand work to other threads while the
    model computes: Python's lock is free then.
    """

    @property
    def memory_identity(self) -> MemoryIdentity:
        """What decides whether the session continues a saved stream."""
        ...

    @property
    def vocab(self) -> Vocab:
        """The vocabulary of the token ids; raises StreamError for a step that is no language model."""
        ...

    @property
    def spec(self) -> Spec | None:
        """The contract of the artefact that the session was opened on; None if the session is the trained
        model itself.
        """
        ...

    @property
    def computed_by(self) -> str:
        """What computes a step, in words for people, such as "ONNX Runtime, fused operator"."""
        ...

    @property
    def kernel(self) -> str | None:
        """The same for scripts, if a runtime has several implementations (`standard`, `fused`, `cuda`); None
        if it has one.
        """
        ...

    @property
    def paths(self) -> Paths | None:
        """The ways in which the session may compute a step; None if it has one."""
        ...

    def with_rule(self, rule: MemoryRule) -> Session:
        """A session of the same weights under another rule; the session itself if the rule is its own.

        The weights are shared and not read again. Memory does not pass between sessions of different rules.
        Raises StreamError if the rule is fixed in a graph.
        """
        ...

    def step_bytes(self, *, segment: int) -> int:
        """About how many bytes one row of a step needs in a segment of that many tokens, with its memory."""
        ...

    def most_rows(self, tokens: int) -> int:
        """The most rows of a step of that many tokens."""
        ...

    def start(self, batch: int) -> Memory:
        """The memory of `batch` new streams, all at position 0."""
        ...

    def step(self, tokens: Any, memory: Memory, *, lengths: np.ndarray | None = None) -> tuple[Any, Memory]:
        """Logits float32 [B, T, V] of the token after each token of a segment, and the memory after it.

        A dict of inputs by name returns a dict of outputs by name. An array may be given, and is returned, if
        there is one input and one output, as in a language model. The spec lists the inputs and outputs of a
        step that is no language model (`Spec.signature`).

        Like `predict` and `score`, it feeds tokens int64 [B, T] and updates the memory in place;
        `memory.copy()` forks it before. For tokens, lengths, a batch or a memory that does not fit they raise
        StreamError and leave the memory as it was.

        lengths: int [B], from 0 to T; None means T in every row. Row b is fed its first lengths[b] tokens,
        and `memory.positions[b]` grows by lengths[b]; the other tokens are padding, which nothing sees, and
        their logits are NaN. A row's results never depend on the other rows or on padding. Ring memory on
        ONNX Runtime and runs in PyTorch can do that; other sessions refuse `lengths` with a StreamError.
        """
        ...

    def predict(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        """Logits float32 [B, V] of the token after the last fed token of each row; NaN in a row of length
        0.
        """
        ...

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        """log p(target) float32 [B, T] in nats, of targets int64 [B, T]; 0 where a target is -1, which means
        not wanted. After padding nothing else may be asked for.
        """
        ...


def is_language_model(session: Session) -> bool:
    """Whether its steps read token ids of a vocabulary and return logits of the next token."""
    return session.spec is None or session.spec.language_model


class Opener(Protocol):
    """A session class, or a module with these functions: it opens a kind of folder and describes one."""

    def open(
        self, folder: Path, *, threads: int | None = None, device: Device = AUTO, identity: str | None = None
    ) -> Session:
        """A session over the verified content of `folder`; raises ConfigError for a device that cannot
        compute it, and ArtefactError if its identity is not `identity`.
        """
        ...

    def describe(self, folder: Path) -> dict[str, Any]:
        """The facts that `info` prints: `kind`, `identity`, `model`, `rule`, and what else this kind of
        folder has.

        Artefacts and engines are described from their files, without the package that would run them.
        """
        ...
