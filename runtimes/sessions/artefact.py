"""Opens an artefact on the requested device, or on the best one that computes it correctly here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError, MissingPackageError, UserError
from runtimes.base.progress import say_once
from runtimes.base.startup import load_onnxruntime
from runtimes.contract.device import AUTO, CPU, Device, refuse_for_artefact
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from runtimes.sessions.onnx_runtime import OrtSession, read_artefact
from runtimes.sessions.ort_gpu.packages import CUDA_PROVIDER, fault_of_both

TRIED_TOKENS = 24  # of each row of the reference
SINGLE_TOKENS = 8  # enough for a CUDA graph in both directions
BEST = Device("cuda")


def open(
    folder: Path, *, threads: int | None = None, device: Device = AUTO, identity: str | None = None
) -> Session:
    """The session over an artefact whose every hash was verified.

    With `auto` it is the first GPU if ONNX Runtime has CUDA and reproduces the reference's answers to
    some tokens; otherwise it is the CPU, and a warning says why, once. Raises ConfigError for a device
    that cannot compute artefacts, and MissingPackageError or ArtefactError for one that cannot do so
    here.
    """
    refuse_for_artefact(device, folder)
    with read_artefact(folder, identity) as (spec, contents):
        if device == CPU or (device == AUTO and not _has_cuda()):
            # A package for GPUs is installed and is not used: that must not pass silently.
            if device == AUTO and (fault := fault_of_both()):
                say_once(f"computing on the CPU, because {fault}")
            return OrtSession.of(folder, spec, contents, threads=threads)
    from runtimes.sessions.ort_gpu import provider  # not on the CPU, which opens sooner
    from runtimes.sessions.ort_gpu.session import OrtGpuSession

    if device != AUTO:
        return OrtGpuSession.of(folder, spec, contents, device=device, threads=threads)
    if fault := provider.PROVIDER.fault(load_onnxruntime()):
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


describe = OrtSession.describe  # as it runs on the CPU


def _has_cuda() -> bool:
    try:
        ort = load_onnxruntime()
    except MissingPackageError:  # `OrtSession` says what to install
        return False
    return CUDA_PROVIDER in ort.get_available_providers()


def refuse_wrong_answers(session: Session, folder: Path, spec: Spec) -> None:
    """Raises ArtefactError unless a session reproduces the artefact's reference for some tokens.

    The first segments are fed as in the reference; then, if the mask allows it, the first tokens one by
    one, as in generation.
    """
    from runtimes.base.logits import differences  # only a GPU is tried, and importing these takes time
    from runtimes.contract.reference import load_reference, load_step_reference, replay, step_differences

    if not spec.language_model:
        outputs = load_step_reference(folder, spec)
        _refuse_beyond(session, spec, step_differences(session, outputs, _first(outputs.segments)), "")
        return
    reference = load_reference(folder, spec)
    segments = _first(reference.segments)
    trials = [(segments, reference.restarts[: len(segments)])]
    if spec.cuts_change_nothing and not spec.fixed_rows:
        singles = [1] * min(SINGLE_TOKENS, segments[0])  # a row may restart after the first segment
        restarts = np.zeros((len(singles), len(reference.tokens)), bool)
        restarts[0] = reference.restarts[0]
        trials.append((singles, restarts))
    for lengths, restarts in trials:
        fed = sum(lengths)
        log_probs, _ = replay(session, reference.tokens[:, : fed + 1], lengths, restarts)
        _refuse_beyond(session, spec, differences(log_probs, reference.log_probs[:, :fed]), " nats")


def _first(segments: np.ndarray) -> list[int]:
    """The first segments of a reference, up to the one that completes `TRIED_TOKENS` tokens."""
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
