"""Proof that an exported graph computes what PyTorch computes, before the export returns."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from tqdm import tqdm

from runtimes.base.errors import ArtefactError, DivergedError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.precision import QUANTISED
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import Reference, replay

WRAPS = 3  # how many times the chained streams go around the ring,
ENOUGH = 4096  # unless that takes more tokens than these: then once, and a few segments more
ROWS = 3  # the largest batch of the validation
FAR = 1 << 33  # a position that 32 bits cannot hold


def validate(exported: Session, torch: Session, *, tolerance: float, seed: int = 0) -> Reference:
    """Compares an exported graph with the model it came from, and returns the answers of the latter.

    First single segments of three shapes from empty memory, over the whole vocabulary; then two chained
    streams past the ring's end, token by token, one of them restarted on the way; then one beyond token
    `FAR`, where a memory of zeros is seen. Raises ArtefactError when any log-probability differs by more than
    `tolerance` (nats).
    """
    draw = np.random.default_rng(seed)
    rule, vocab_size = exported.rule, exported.vocab.size
    for batch, segment in ((1, 1), (2, min(5, rule.segment)), (ROWS, rule.segment)):
        tokens = draw.integers(0, vocab_size, (batch, segment))
        logits = [session.step(tokens, session.start(batch))[0] for session in (exported, torch)]
        differences = [x - log_sum_exp(x)[..., None] for x in logits]
        _compare(
            *differences, tolerance=tolerance, what=f"{batch} rows of {segment} tokens from empty memory"
        )
    segments = chained_segments(rule)
    tokens = draw.integers(0, vocab_size, (2, int(segments.sum()) + 1))
    restarts = np.zeros((len(segments), 2), bool)
    restarts[len(segments) * 2 // 3, 1] = True
    lengths = segments.tolist()
    log_probs, last = replay(torch, tokens, _shown(lengths, "PyTorch's answers"), restarts)
    answers = replay(exported, tokens, _shown(lengths, "the graph's answers"), restarts)
    for mine, theirs in zip(answers, (log_probs, last), strict=True):
        _compare(
            mine,
            theirs,
            tolerance=tolerance,
            what=f"two streams of {tokens.shape[1] - 1} tokens in {len(segments)} segments",
        )
    if any(len(tensor.shape) == 4 for tensor in exported.state):  # hidden states do not depend on positions
        _compare(
            _far_on(exported), _far_on(torch), tolerance=tolerance, what=f"a stream beyond token {FAR:,}"
        )
    return Reference(
        tokens=tokens, segments=segments, restarts=restarts, log_probs=log_probs.astype(np.float32), last=last
    )


def check_again(lowered: OrtSession, reference: Reference) -> Reference:
    """The reference of the same model in a lower precision: PyTorch's, or the graph's own answers where
    weights are quantised.

    Raises ArtefactError when answers are not finite, or differ from PyTorch's by more than the precision's
    tolerance.
    """
    shown = _shown(reference.segments.tolist(), f"answers in {lowered.spec.precision}")
    log_probs, last = replay(lowered, reference.tokens, shown, reference.restarts)
    if lowered.spec.precision in QUANTISED:
        worst = np.array([np.abs(log_probs).max(), np.abs(last).max()])
        if not np.isfinite(worst).all():
            raise ArtefactError(
                f"in {lowered.spec.precision} the graph gives probabilities that are not finite; take more "
                "bits."
            )
        return dataclasses.replace(reference, log_probs=log_probs.astype(np.float32), last=last)
    for mine, theirs in ((log_probs, reference.log_probs), (last, reference.last)):
        _compare(
            mine,
            theirs,
            tolerance=lowered.spec.tolerance,
            what=f"{log_probs.size} tokens in {lowered.spec.precision}",
        )
    return reference


def chained_segments(rule: MemoryRule) -> np.ndarray:
    """Lengths T, 1, 7, T, T, 3, … int64 that together pass the ring's end: see `WRAPS` and `ENOUGH`.

    Once these have been through, only whole segments fill a ring that is longer, until its end is near. None
    ends where the ring does, so that some are written across its end, unless T is 1 or there is no memory.
    """
    T, S = rule.segment, rule.slots
    pattern = [min(length, T) for length in (T, 1, 7, T, T, 3, T)]
    wanted = max(S + sum(pattern), min(WRAPS * S, ENOUGH))
    lengths: list[int] = []
    following, total = itertools.cycle(pattern), 0
    while total <= wanted:
        length = T if sum(pattern) <= total < S - T else next(following)
        at_the_end = 1 < T < S and (total + length) % S == 0
        lengths += ([T, length] if length < T else [T - 1, T]) if at_the_end else [length]
        total = sum(lengths)
    return np.array(lengths)


def _far_on(session: Session) -> np.ndarray:
    """log p of the next tokens [2, N] of two streams, the first of them beyond token `FAR`, where all its
    memory is zero.
    """
    rule, memory, segments = session.rule, session.start(2), []
    memory.positions[0] = FAR
    for length in (rule.segment, 1, min(7, rule.segment), rule.segment):
        tokens = np.arange(2 * (length + 1)).reshape(2, -1) % session.vocab.size
        log_probs, memory = session.score(tokens[:, :-1], tokens[:, 1:], memory)
        segments.append(log_probs)
    return np.concatenate(segments, axis=1)


def _shown(lengths: list[int], what: str) -> tqdm[int]:
    """The segments' lengths with a progress bar on a terminal, which goes when they are done."""
    return tqdm(lengths, desc=what, unit="segment", leave=False, disable=None)


def _compare(mine: np.ndarray, theirs: np.ndarray, *, tolerance: float, what: str) -> None:
    if not np.isfinite(theirs).all():
        raise DivergedError(
            f"PyTorch itself gives log-probabilities that are not finite over {what}, so there is nothing "
            "to compare the graph with; nothing was written: export a checkpoint from before the loss "
            "diverged."
        )
    worst = float(np.abs(mine - theirs).max())
    if not worst <= tolerance:
        raise ArtefactError(
            f"the exported graph differs from PyTorch by {worst:.3g} nats over {what}, more than "
            f"{tolerance:g}; nothing was written: check that the checkpoint's weights are finite and of a "
            "trained model, or report this."
        )
