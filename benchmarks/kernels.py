"""Sessions of either kernel for benchmarks: checked before anything is timed."""

from __future__ import annotations

from pathlib import Path

from runtimes import check, fused
from runtimes.errors import ArtefactError
from runtimes.ort_session import Kernel, OrtSession


def library_of(kernel: Kernel) -> Path | None:
    """The fused kernel's library, built if it is not there yet; None for the standard operators."""
    return fused.build() if kernel == "fused" else None


def open_checked(artefact: Path, *, threads: int, kernel: Kernel) -> OrtSession:
    """A session of an artefact that `export` has just made, and so compared with PyTorch in the standard operators.

    Raises ArtefactError where the fused kernel differs from PyTorch's answers by more than the tolerance.
    """
    if library_of(kernel) and not (report := check(artefact, threads=threads)).passed:
        raise ArtefactError(
            f"the fused kernel differs from PyTorch by {report.max_difference:.3g} nats, more than {report.tolerance:g}; "
            "nothing was measured: report this."
        )
    return OrtSession.open(artefact, threads=threads, kernel=kernel)
