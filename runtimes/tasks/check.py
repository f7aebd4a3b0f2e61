"""The self-test of an artefact: it replays `reference.npz`, which holds tokens and PyTorch's answers to them.

The streams of a reference start with empty memory and run well past the memory length in segments of 1, 7 and
T tokens. One row is restarted on the way. Restarts, segments and answers are all in the file, so replaying
needs no PyTorch.
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
from runtimes.base.sealed import read_verified
from runtimes.contract.precision import QUANTISED, unmeasured
from runtimes.contract.session import Session
from runtimes.contract.spec import EXPORT_AGAIN, REFERENCE, SPEC, Spec
from runtimes.sessions.open import open_session


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Tokens, how they are fed, and the answers to them.

    tokens: int64 [B, N + 1]. segments: int64, the lengths of the segments; their sum is N. restarts: bool
    [segments, B], the rows that start a new text at a segment. log_probs: float32 [B, N], of each next token.
    last: float32 [B, V], of every symbol after the last token.
    """

    tokens: np.ndarray
    segments: np.ndarray
    restarts: np.ndarray
    log_probs: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Whether this device computes what the trained model computes.

    Differences are in log-probability (nats).

    against: whose answers they were compared with. These are PyTorch's, or with quantised weights those of
    the machine that exported. The mean difference has a tolerance of its own. computed_by, kernel: what
    computed here, as `Session` has it. note: what a passed check does not say.
    """

    passed: bool
    max_difference: float
    tolerance: float
    mean_difference: float
    mean_tolerance: float
    tokens: int
    seconds: float
    against: str
    computed_by: str
    kernel: str | None = None
    note: str | None = None

    @property
    def sentence(self) -> str:
        mean = f", {self.mean_difference:.2e} in the mean (tolerance {self.mean_tolerance:g})"
        return (
            f"{self.tokens} log-probabilities differ from {self.against} by at most "
            f"{self.max_difference:.2e} nats (tolerance "
            f"{self.tolerance:g}){mean if self.mean_tolerance < self.tolerance else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def check(artefact: Path | str, *, threads: int | None = None) -> CheckReport:
    """A report of how far every log-probability on this device is from the reference of an artefact or
    engine.

    Raises ArtefactError for a folder that is damaged, and for one that holds no reference, such as a run.
    """
    folder = Path(artefact)
    session = open_session(folder, threads=threads)
    if session.spec is None:
        raise ArtefactError(
            f"{folder} is a run, the reference itself; check the artefact that `xl-export export` makes of "
            "it."
        )
    spec, quantised = session.spec, session.spec.precision in QUANTISED
    reference = load_reference(folder / REFERENCE, spec)
    began = time.perf_counter()
    log_probs, last = replay(session, reference.tokens, reference.segments.tolist(), reference.restarts)
    seconds = time.perf_counter() - began
    differences = np.concatenate(
        [np.abs(log_probs - reference.log_probs).ravel(), np.abs(last - reference.last).ravel()]
    )
    # A NaN anywhere makes both figures NaN, and no comparison with a tolerance holds for a NaN.
    worst, mean = float(differences.max()), float(differences.mean())
    return CheckReport(
        passed=worst <= spec.tolerance and mean <= spec.mean_tolerance,
        max_difference=worst,
        tolerance=spec.tolerance,
        mean_difference=mean,
        mean_tolerance=spec.mean_tolerance,
        tokens=log_probs.size,
        seconds=seconds,
        against="the exporting machine" if quantised else "PyTorch",
        computed_by=session.computed_by,
        kernel=session.kernel,
        note=unmeasured(spec.precision) if quantised and spec.measured is None else None,
    )


def replay(
    session: Session, tokens: np.ndarray, segments: Iterable[int], restarts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log p of each next token [B, N], and of every symbol after the last token [B, V], over chained
    segments.
    """
    memory = session.start(len(tokens))
    pieces, at, before_last = [], 0, None
    for length, restart in zip(segments, restarts, strict=True):
        memory.positions[restart] = 0
        piece = tokens[:, at : at + length]
        if (
            at + length == tokens.shape[1] - 1
        ):  # the last segment is fed twice: it is scored, then predicted from
            before_last = memory.copy()
        log_probs, memory = session.score(piece, tokens[:, at + 1 : at + length + 1], memory)
        pieces.append(log_probs)
        at += length
    assert before_last is not None, "the segments do not end with the tokens"
    last, _ = session.predict(piece, before_last)
    return np.concatenate(pieces, axis=1), last - log_sum_exp(last)[:, None]


def save_reference(path: Path, reference: Reference) -> None:
    """Writes a reference as a compressed `.npz` file."""
    np.savez_compressed(path, **reference.__dict__)


def load_reference(path: Path, spec: Spec) -> Reference:
    """The reference of an artefact, its shapes and values checked; raises ArtefactError where they do not
    fit.
    """
    facts = spec.files.get(path.name)
    content = None if facts is None else read_verified(path, facts, record=SPEC, again=EXPORT_AGAIN)
    arrays = read_npz(path, content)
    try:
        reference = Reference(**arrays)
    except TypeError as error:
        raise ArtefactError(
            f"{path} does not hold the arrays of a reference; export the artefact again."
        ) from error
    batch, length = reference.log_probs.shape if reference.log_probs.ndim == 2 else (0, 0)
    expected = {
        "tokens": ("int64", (batch, length + 1)),
        "segments": ("int64", reference.segments.shape[:1]),
        "restarts": ("bool", (*reference.segments.shape[:1], batch)),
        "log_probs": ("float32", (batch, length)),
        "last": ("float32", (batch, spec.model.vocab_size)),
    }
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
