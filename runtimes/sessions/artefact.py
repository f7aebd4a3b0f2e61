"""Opens an artefact on the requested device, or on the best one that computes it correctly here."""

from __future__ import annotations

from pathlib import Path

from runtimes.base.errors import MissingPackageError, UserError
from runtimes.base.progress import say_once
from runtimes.base.startup import load_onnxruntime
from runtimes.contract.device import AUTO, CPU, Device, refuse_for_artefact
from runtimes.contract.session import Session
from runtimes.sessions.onnx_runtime import OrtSession, read_artefact
from runtimes.sessions.ort_gpu.providers import PROVIDERS, fault_of_both

BEST = Device("cuda")  # engines take minutes to build, so they are built only on request


def open(folder: Path, *, threads: int | None = None, device: Device = AUTO) -> Session:
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
    from runtimes.sessions.ort_gpu.session import OrtGpuSession  # not on the CPU, which opens sooner
    from runtimes.sessions.ort_gpu.trial import refuse_wrong_answers

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


describe = OrtSession.describe  # as it runs on the CPU


def _has_cuda() -> bool:
    try:
        ort = load_onnxruntime()
    except MissingPackageError:  # `OrtSession` says what to install
        return False
    return PROVIDERS[BEST.kind].name in ort.get_available_providers()
