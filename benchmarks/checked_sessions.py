"""Opens sessions, compares them before anything is timed, and steps them with full memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime

from runtimes import check
from runtimes.base.errors import ArtefactError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession

Operators = Literal["standard", "fused"]  # ONNX Runtime's own, or the fused operator for the CPU


def fused_library(operators: Operators) -> Path | None:
    """The library of the fused operator, which is built if it is missing; None for standard operators."""
    return fused_cpu.build() if operators == "fused" else None


def open_graph(
    graph: Path | bytes, *, threads: int, library: Path | None = None
) -> onnxruntime.InferenceSession:
    """A model, as a file or serialised, on ONNX Runtime's CPU provider.

    library: of the fused operator, if the graph contains it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(str(library))
    source = graph if isinstance(graph, bytes) else str(graph)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def open_checked(artefact: Path, *, threads: int, operators: Operators) -> OrtSession:
    """A session of an artefact that was just exported.

    The export has compared the standard operators with PyTorch; the fused operator is compared here. Raises
    ArtefactError if its answers differ from PyTorch's by more than the tolerance.
    """
    if fused_library(operators) and not (report := check(artefact, threads=threads, device="cpu")).passed:
        raise ArtefactError(
            f"the fused operator failed its check ({report.sentence}); nothing was measured, please report "
            "this."
        )
    return OrtSession.open(artefact, threads=threads, kernel=operators)


def agreed(difference: float, tolerance: float, what: str, unit: str = "nats") -> float:
    """The difference between two sides; raises ArtefactError beyond the tolerance, so that nothing is timed.

    what: the beginning of a sentence, such as "the growing cache differs from PyTorch".
    """
    if not difference <= tolerance:  # true for NaN as well
        raise ArtefactError(
            f"{what} by {difference:.3g} {unit}, more than {tolerance:g}; nothing was measured, please "
            "report this."
        )
    return difference


def nats_apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of log-probabilities between two logits [..., V]."""
    log_probs = [x - log_sum_exp(x)[..., None] for x in (one, other)]
    return float(np.abs(log_probs[0] - log_probs[1]).max())


def fed(session: Session, tokens: np.ndarray, memory: Memory | None = None) -> tuple[np.ndarray, Memory]:
    """log p [N - 1] of each of tokens [1, N] but the first, read in segments, and the memory after the last.

    memory: is used again, from its start; a new one by default.
    """
    memory = memory or session.start(1)
    memory.positions[:] = 0
    pieces = []
    for at in range(0, tokens.shape[1] - 1, session.rule.segment):
        piece = tokens[:, at : at + session.rule.segment + 1]
        log_probs, memory = session.score(piece[:, :-1], piece[:, 1:], memory)
        pieces.append(log_probs[0])
    return np.concatenate(pieces), memory


def filled(session: Session, batch: int = 1) -> Memory:
    """The memory of streams that have run once around the ring."""
    draw = np.random.default_rng(0)
    memory = session.start(batch)
    while memory.positions[0] <= session.rule.slots:
        tokens = draw.integers(0, session.vocab.size, (batch, session.rule.segment))
        _, memory = session.predict(tokens, memory)
    return memory


def step_of(session: Session, batch: int = 1, tokens: int = 1) -> Callable[[], Any]:
    """A step with full memory, to be timed."""
    memory = filled(session, batch)
    segment = np.zeros((batch, tokens), np.int64)
    return lambda: session.step(segment, memory)
