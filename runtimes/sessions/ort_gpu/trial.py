"""Whether a session on a GPU computes what the artefact's reference says, by a short trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.base.logits import differences, output_differences
from runtimes.contract.reference import (
    Reference,
    StepReference,
    load_reference,
    load_step_reference,
    replay,
    replay_step,
)
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec

TRIED_TOKENS = 24  # of the reference, in each of its rows
SINGLE_TOKENS = 8  # enough for a CUDA graph in both directions


def refuse_wrong_answers(session: Session, folder: Path, spec: Spec) -> None:
    """Raises ArtefactError unless a session reproduces the artefact's reference for some tokens.

    The first segments are fed as in the reference; then, if the mask allows it, the first tokens one by
    one, as in generation.
    """
    if not spec.language_model:
        _refuse_wrong_outputs(session, load_step_reference(folder, spec), spec)
        return
    reference = load_reference(folder, spec)
    trials = [_beginning(reference, TRIED_TOKENS)]
    if (
        spec.rule.mask == "same-length" and "cuts" not in spec.without and not spec.fixed_rows
    ):  # under the other mask answers depend on how tokens are cut
        trials.append(_one_by_one(reference, SINGLE_TOKENS))
    for trial in trials:
        log_probs, _ = replay(session, trial.tokens, trial.segments.tolist(), trial.restarts)
        difference = float(differences(log_probs, trial.log_probs).max())
        if not difference <= spec.tolerance:  # nor for a NaN
            raise ArtefactError(
                f"{session.computed_by} differs from the reference by {difference:.2g} nats (tolerance "
                f"{spec.tolerance:g}); `xl-export check --device` shows more."
            )


def _refuse_wrong_outputs(session: Session, reference: StepReference, spec: Spec) -> None:
    """`refuse_wrong_answers` for a step that is no language model."""
    count = int(np.searchsorted(np.cumsum(reference.segments), TRIED_TOKENS)) + 1
    segments = reference.segments[:count].tolist()
    outputs = replay_step(session, reference.inputs, segments, reference.restarts[:count])
    for name, output in outputs.items():
        difference = float(output_differences(output, reference.outputs[name][:, : output.shape[1]]).max())
        if not difference <= spec.tolerance:
            raise ArtefactError(
                f"{session.computed_by} differs from the reference by {difference:.2g} in {name} (tolerance "
                f"{spec.tolerance:g}); `xl-export check --device` shows more."
            )


def _beginning(reference: Reference, tokens: int) -> Reference:
    """The first segments of a reference, so many that they have `tokens` tokens or more."""
    count = int(np.searchsorted(np.cumsum(reference.segments), tokens)) + 1
    return _cut(reference, reference.segments[:count], reference.restarts[:count])


def _one_by_one(reference: Reference, tokens: int) -> Reference:
    """The first tokens of a reference in segments of one; no more than its first segment has, after which a
    row may restart.
    """
    segments = np.ones(min(tokens, int(reference.segments[0])), np.int64)
    restarts = np.zeros((len(segments), len(reference.tokens)), bool)
    restarts[0] = reference.restarts[0]
    return _cut(reference, segments, restarts)


def _cut(reference: Reference, segments: np.ndarray, restarts: np.ndarray) -> Reference:
    length = int(segments.sum())
    return Reference(
        tokens=reference.tokens[:, : length + 1],
        segments=segments,
        restarts=restarts,
        log_probs=reference.log_probs[:, :length],
        last=reference.last,
    )
