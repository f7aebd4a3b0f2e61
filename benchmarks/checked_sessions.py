"""Sessions on ONNX Runtime whose answers were compared with PyTorch before anything is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import onnxruntime

from runtimes import check
from runtimes.base.errors import ArtefactError
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession

Operators = Literal["standard", "fused"]  # ONNX Runtime's own, or the fused operator for the CPU


def fused_library(operators: Operators) -> Path | None:
    """The library of the fused operator, built where it is missing; None for standard operators."""
    return fused_cpu.build() if operators == "fused" else None


def open_graph(
    graph: Path | bytes, *, threads: int, library: Path | None = None
) -> onnxruntime.InferenceSession:
    """A model, as a file or serialised, on ONNX Runtime's CPU provider.

    library: of the fused operator, where the graph contains it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(str(library))
    source = graph if isinstance(graph, bytes) else str(graph)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def open_checked(artefact: Path, *, threads: int, operators: Operators) -> OrtSession:
    """A session of an artefact that was just exported.

    The export has compared the standard operators with PyTorch; the fused operator is compared here. Raises
    ArtefactError where its answers differ from PyTorch's by more than the tolerance.
    """
    if fused_library(operators) and not (report := check(artefact, threads=threads, device="cpu")).passed:
        raise ArtefactError(
            f"the fused operator differs from PyTorch by {report.max_difference:.3g} nats, more than "
            f"{report.tolerance:g}; nothing was measured, please report this."
        )
    return OrtSession.open(artefact, threads=threads, kernel=operators)
