"""Opens an artefact on the requested device, or on the best one that computes it correctly here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, MissingPackageError, UserError
from runtimes.base.logits import differences, output_differences
from runtimes.base.progress import say_once
from runtimes.base.startup import load_onnxruntime
from runtimes.contract.device import AUTO, CPU, Device, refuse_for_artefact
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
from runtimes.sessions.onnx_runtime import OrtSession, read_artefact
from runtimes.sessions.ort_gpu.providers import PROVIDERS, fault_of_both
from runtimes.sessions.ort_gpu.session import OrtGpuSession

BEST = Device("cuda")  # engines take minutes to build, so they are built only on request
TRIED_TOKENS = 24  # of the reference, in each of its rows
SINGLE_TOKENS = 8  # enough for a CUDA graph in both directions


class ArtefactOpener:
    """What `runtimes/sessions/open.py` needs of an artefact; see `runtimes.contract.session.SessionClass`."""

    @classmethod
    def open(cls, folder: Path, *, threads: int | None = None, device: Device = AUTO) -> Session:
        """The session over an artefact whose every hash was verified.

        With `auto` it is the first GPU if ONNX Runtime has CUDA and reproduces the reference's answers to
        some tokens; otherwise it is the CPU, and a warning says why, once. Raises ConfigError for a device
        that cannot compute artefacts, and MissingPackageError or ArtefactError for one that cannot do so
        here.
        """
        refuse_for_artefact(device, folder)
        with read_artefact(folder) as (spec, contents):
            if device == CPU or (device == AUTO and not _has_cuda()):
                # A package for GPUs is installed and is not used: that must not pass silently.
                if device == AUTO and (fault := fault_of_both()):
                    say_once(f"computing on the CPU, because {fault}")
                return OrtSession.of(folder, spec, contents, threads=threads)
        if device != AUTO:
            return OrtGpuSession.of(folder, spec, contents, device=device, threads=threads)
        if fault := PROVIDERS[BEST.kind].fault(load_onnxruntime()):
            say_once(f"computing on the CPU, because {fault}")
            return OrtSession.of(folder, spec, contents, threads=threads)
        try:
            session = OrtGpuSession.of(folder, spec, contents, device=BEST, threads=threads)
            refuse_wrong_answers(session, folder, spec)
        except UserError as error:
            say_once(f"computing on the CPU, because {BEST} was tried and cannot be used: {error}")
            return OrtSession.of(folder, spec, contents, threads=threads)
        say_once(f"computing with {session.computed_by}")
        return session

    @classmethod
    def describe(cls, folder: Path) -> dict[str, Any]:
        """The facts of the artefact in a folder, as it runs on the CPU; needs no ONNX Runtime."""
        return OrtSession.describe(folder)


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


def _has_cuda() -> bool:
    try:
        ort = load_onnxruntime()
    except MissingPackageError:  # `OrtSession` says what to install
        return False
    return PROVIDERS[BEST.kind].name in ort.get_available_providers()


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
