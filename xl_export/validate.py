"""Proof that an exported graph computes what PyTorch computes, before the export returns."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from tqdm import tqdm

from runtimes.errors import ArtefactError
from runtimes.logits import log_sum_exp
from runtimes.ort_session import OrtSession
from runtimes.precision import QUANTISED
from runtimes.reference import Reference, replay
from runtimes.rule import MemoryRule
from runtimes.session import Session

WRAPS = 3  # ring lengths that the chained streams run through
ROWS = 3  # the most rows of a batch here


def validate(exported: Session, torch: Session, *, tolerance: float, seed: int = 0) -> Reference:
    """Compares an exported graph with the model it came from, and returns the answers of the latter.

    First single segments of three shapes from empty memory, over the whole vocabulary; then two chained
    streams through three wraps of the ring, token by token. Raises ArtefactError when any log-probability
    differs by more than `tolerance` (nats).
    """
    draw = np.random.default_rng(seed)
    rule, vocab_size = exported.rule, exported.vocab.size
    for batch, segment in ((1, 1), (2, min(5, rule.segment)), (ROWS, rule.segment)):
        tokens = draw.integers(0, vocab_size, (batch, segment))
        logits = [session.step(tokens, session.start(batch))[0] for session in (exported, torch)]
        differences = [x - log_sum_exp(x)[..., None] for x in logits]
        _compare(*differences, tolerance=tolerance, what=f"{batch} rows of {segment} tokens from empty memory")
    segments = chained_segments(rule)
    tokens = draw.integers(0, vocab_size, (2, int(segments.sum()) + 1))
    restarts = np.zeros((len(segments), 2), bool)
    restarts[len(segments) * 2 // 3, 1] = True
    lengths = segments.tolist()
    log_probs, last = replay(torch, tokens, _shown(lengths, "PyTorch's answers"), restarts)
    answers = replay(exported, tokens, _shown(lengths, "the graph's answers"), restarts)
    for mine, theirs in zip(answers, (log_probs, last), strict=True):
        _compare(
            mine, theirs, tolerance=tolerance, what=f"two streams of {tokens.shape[1] - 1} tokens in {len(segments)} segments"
        )
    return Reference(tokens=tokens, segments=segments, restarts=restarts, log_probs=log_probs.astype(np.float32), last=last)


def check_again(lowered: OrtSession, reference: Reference) -> Reference:
    """The reference of the same model in a lower precision: PyTorch's, or the graph's own answers where weights are quantised.

    Raises ArtefactError when answers are not finite, or differ from PyTorch's by more than the precision's tolerance.
    """
    shown = _shown(reference.segments.tolist(), f"answers in {lowered.spec.precision}")
    log_probs, last = replay(lowered, reference.tokens, shown, reference.restarts)
    if lowered.spec.precision in QUANTISED:
        worst = np.array([np.abs(log_probs).max(), np.abs(last).max()])
        if not np.isfinite(worst).all():
            raise ArtefactError(f"in {lowered.spec.precision} the graph gives probabilities that are not finite; take more bits.")
        return dataclasses.replace(reference, log_probs=log_probs.astype(np.float32), last=last)
    for mine, theirs in ((log_probs, reference.log_probs), (last, reference.last)):
        _compare(mine, theirs, tolerance=lowered.spec.tolerance, what=f"{log_probs.size} tokens in {lowered.spec.precision}")
    return reference


def chained_segments(rule: MemoryRule) -> np.ndarray:
    """Lengths T, 1, 7, T, T, 3, … int64, that together pass the ring `WRAPS` times."""
    lengths, total = [], 0
    for length in itertools.cycle([rule.segment, 1, 7, rule.segment, rule.segment, 3, rule.segment]):
        lengths.append(min(length, rule.segment))
        total += lengths[-1]
        if total > WRAPS * rule.slots and len(lengths) >= 7:
            return np.array(lengths)


def _shown(lengths: list[int], what: str) -> tqdm[int]:
    """The segments' lengths with a progress bar on a terminal, which goes when they are done."""
    return tqdm(lengths, desc=what, unit="segment", leave=False, disable=None)


def _compare(mine: np.ndarray, theirs: np.ndarray, *, tolerance: float, what: str) -> None:
    worst = float(np.abs(mine - theirs).max())
    if not worst <= tolerance:
        raise ArtefactError(
            f"the exported graph differs from PyTorch by {worst:.3g} nats over {what}, more than {tolerance:g}; "
            "nothing was written: check that the checkpoint's weights are finite and of a trained model, or report this."
        )
