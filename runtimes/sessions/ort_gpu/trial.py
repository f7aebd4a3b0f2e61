"""Whether a session on a GPU computes what the artefact's reference says, by a short trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.base.logits import differences
from runtimes.contract.reference import load_reference, load_step_reference, replay, step_differences
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec

TRIED_TOKENS = 24  # of each row of the reference
SINGLE_TOKENS = 8  # enough for a CUDA graph in both directions


def refuse_wrong_answers(session: Session, folder: Path, spec: Spec) -> None:
    """Raises ArtefactError unless a session reproduces the artefact's reference for some tokens.

    The first segments are fed as in the reference; then, if the mask allows it, the first tokens one by
    one, as in generation.
    """
    if not spec.language_model:
        outputs = load_step_reference(folder, spec)
        _refuse_beyond(session, spec, step_differences(session, outputs, _first(outputs.segments)), "")
        return
    reference = load_reference(folder, spec)
    segments = _first(reference.segments)
    trials = [(segments, reference.restarts[: len(segments)])]
    if (
        spec.rule.mask == "same-length" and "cuts" not in spec.without and not spec.fixed_rows
    ):  # under the other mask answers depend on how tokens are cut
        singles = [1] * min(SINGLE_TOKENS, segments[0])  # a row may restart after the first segment
        restarts = np.zeros((len(singles), len(reference.tokens)), bool)
        restarts[0] = reference.restarts[0]
        trials.append((singles, restarts))
    for lengths, restarts in trials:
        fed = sum(lengths)
        log_probs, _ = replay(session, reference.tokens[:, : fed + 1], lengths, restarts)
        _refuse_beyond(session, spec, differences(log_probs, reference.log_probs[:, :fed]), " nats")


def _first(segments: np.ndarray) -> list[int]:
    """The first segments of a reference, so many that they have `TRIED_TOKENS` tokens or more."""
    count = int(np.searchsorted(np.cumsum(segments), TRIED_TOKENS)) + 1
    first: list[int] = segments[:count].tolist()
    return first


def _refuse_beyond(session: Session, spec: Spec, found: np.ndarray, unit: str) -> None:
    difference = float(found.max())
    if not difference <= spec.tolerance:  # nor for a NaN
        raise ArtefactError(
            f"{session.computed_by} differs from the reference by {difference:.2g}{unit} (tolerance "
            f"{spec.tolerance:g}); `xl-export check --device` shows more."
        )
