"""Sessions of either kernel for benchmarks: checked before anything is timed."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from runtimes import check
from runtimes.base.errors import ArtefactError
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import Kernel, OrtSession


def library_of(kernel: Kernel) -> Path | None:
    """The fused kernel's library, built if it is not there yet; None for the standard operators."""
    return fused_cpu.build() if kernel == "fused" else None


def open_graph(
    graph: Path | bytes, *, threads: int, library: Path | None = None
) -> onnxruntime.InferenceSession:
    """A file, or a serialised model, on ONNX Runtime's CPU provider; library: of the fused kernel, where the graph has it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    if library:
        options.register_custom_ops_library(str(library))
    source = graph if isinstance(graph, bytes) else str(graph)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


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
