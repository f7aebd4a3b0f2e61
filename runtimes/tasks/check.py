"""`reference.npz`: tokens and PyTorch's answers to them, inside the artefact, so that any device can check itself.

The streams start with empty memory, run well past the memory length in segments of 1, 7 and T tokens, and
one row is restarted on the way. Restarts, segments and answers are all in the file; replaying needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_npz
from runtimes.base.logits import log_sum_exp
from runtimes.contract.precision import QUANTISED, unmeasured
from runtimes.contract.session import Session
from runtimes.contract.spec import REFERENCE, Spec
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.open import open_session


@dataclass(frozen=True, kw_only=True)
class Reference:
    """tokens int64 [B, N + 1]; segments int64, their lengths, sum N; restarts bool [segments, B]: rows that
    start a new text there; log_probs float32 [B, N] of each next token; last float32 [B, V], of all at the end."""

    tokens: np.ndarray
    segments: np.ndarray
    restarts: np.ndarray
    log_probs: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Whether this device computes what the trained model computes. Differences are in log-probability (nats).

    against: whose answers they are compared with: PyTorch's, or with quantised weights those of the machine that exported.
    The mean has a tolerance of its own. kernel: what ONNX Runtime ran, `standard` or `fused` (see `OrtSession.open`); None for an
    engine. note: what passing does not say.
    """

    passed: bool
    max_difference: float
    tolerance: float
    mean_difference: float
    mean_tolerance: float
    tokens: int
    seconds: float
    against: str
    kernel: str | None = None
    note: str | None = None

    @property
    def sentence(self) -> str:
        mean = f", {self.mean_difference:.2e} in the mean (tolerance {self.mean_tolerance:g})"
        return (
            f"{self.tokens} log-probabilities differ from {self.against} by at most {self.max_difference:.2e} nats "
            f"(tolerance {self.tolerance:g}){mean if self.mean_tolerance < self.tolerance else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def check(artefact: Path | str, *, threads: int | None = None) -> CheckReport:
    """Replays the reference of an artefact or engine on this very device and compares every log-probability.

    Raises ArtefactError for a folder that is damaged, or that holds no reference, such as a run.
    """
    folder = Path(artefact)
    session = open_session(folder, threads=threads)
    if not isinstance(session, GraphSession):
        raise ArtefactError(
            f"{folder} is a run, the reference itself; check the artefact that `xl-export export` makes of it."
        )
    spec, quantised = session.spec, session.spec.precision in QUANTISED
    reference = load_reference(folder / REFERENCE, spec)
    began = time.perf_counter()
    log_probs, last = replay(session, reference.tokens, reference.segments.tolist(), reference.restarts)
    seconds = time.perf_counter() - began
    differences = np.concatenate(
        [np.abs(log_probs - reference.log_probs).ravel(), np.abs(last - reference.last).ravel()]
    )
    worst, mean = (
        float(differences.max()),
        float(differences.mean()),
    )  # of a NaN anywhere NaN, which no tolerance lets pass
    tolerance, mean_tolerance = spec.tolerance, spec.mean_tolerance
    return CheckReport(
        passed=worst <= tolerance and mean <= mean_tolerance, max_difference=worst, tolerance=tolerance, mean_difference=mean,
        mean_tolerance=mean_tolerance, tokens=log_probs.size, seconds=seconds,
        against="the exporting machine" if quantised else "PyTorch",
        kernel=getattr(session, "kernel", None), note=unmeasured(spec.precision) if quantised and spec.measured is None else None,
    )  # fmt: skip


def replay(
    session: Session, tokens: np.ndarray, segments: Iterable[int], restarts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log p of each next token [B, N], and of every symbol after the last one [B, V], over chained segments."""
    memory = session.start(len(tokens))
    pieces, at = [], 0
    for length, restart in zip(segments, restarts, strict=True):
        memory.positions[restart] = 0
        before, piece = (
            memory.copy() if at + length == tokens.shape[1] - 1 else None,
            tokens[:, at : at + length],
        )
        log_probs, memory = session.score(piece, tokens[:, at + 1 : at + length + 1], memory)
        pieces.append(log_probs)
        at += length
    assert before is not None, "the segments do not end with the tokens"
    last, _ = session.predict(piece, before)
    return np.concatenate(pieces, axis=1), last - log_sum_exp(last)[:, None]


def save_reference(path: Path, reference: Reference) -> None:
    np.savez_compressed(path, **reference.__dict__)


def load_reference(path: Path, spec: Spec) -> Reference:
    """The reference of an artefact, its shapes and values checked; raises ArtefactError where they do not fit."""
    arrays = read_npz(path)
    try:
        reference = Reference(**arrays)
    except TypeError as error:
        raise ArtefactError(
            f"{path} does not hold the arrays of a reference; export the artefact again."
        ) from error
    batch, length = reference.log_probs.shape if reference.log_probs.ndim == 2 else (0, 0)
    expected = {
        "tokens": ("int64", (batch, length + 1)), "segments": ("int64", reference.segments.shape[:1]),
        "restarts": ("bool", (*reference.segments.shape[:1], batch)), "log_probs": ("float32", (batch, length)),
        "last": ("float32", (batch, spec.model.vocab_size)),
    }  # fmt: skip
    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    fits = (
        found == expected
        and reference.log_probs.size
        and reference.segments.ndim == 1
        and reference.segments.sum() == length
    )
    tokens = reference.tokens
    if not fits or reference.segments.min() < 1 or tokens.min() < 0 or tokens.max() >= spec.model.vocab_size:
        raise ArtefactError(f"{path} does not hold a reference of this model; export the artefact again.")
    return reference
