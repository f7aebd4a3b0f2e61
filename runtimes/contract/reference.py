"""The reference of an artefact: tokens and the trained model's answers, which any session can replay.

The streams of a reference start with empty memory and run well past the memory length in segments of 1, 7 and
T tokens. One row is restarted on the way. Restarts, segments and answers are all in the file, so replaying
needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_npz
from runtimes.base.logits import log_probability, log_sum_exp
from runtimes.base.sealed import read_verified
from runtimes.contract.session import Session
from runtimes.contract.spec import EXPORT_AGAIN, SPEC, Spec


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
    are computed from the logits of all tokens, which graphs with a large vocabulary give only where asked to.
    """
    memory = session.start(len(tokens))
    taken = set(session.paths.taken) if session.paths else set()
    for length in lead:
        session.step(tokens[:, :length], memory)
    memory.positions[:] = 0
    if session.paths:
        session.paths.without(taken)  # nothing was compared
    pieces, at, before_last = [], 0, None
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
