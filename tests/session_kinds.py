"""The kinds of sessions that `test_sessions.py` puts under the same tests."""

from __future__ import annotations

from pathlib import Path

from tests import fake_gpu

# Every kind of session and what computes it. A new runtime adds a line here, and a folder of its kind to
# `folders_of_kinds`.
COMPUTED_BY = {
    "torch": "PyTorch",
    "ring": "ONNX Runtime, standard operators",
    "shift": "ONNX Runtime, standard operators",
    "hidden": "ONNX Runtime, standard operators",
    "device": "ONNX Runtime, CUDA on cuda",  # over a stand-in for the GPU; its memory is a ring
    "cut-ring": "ONNX Runtime, standard operators",  # for TensorRT: segments are cut at the ring's end
    "engine": "TensorRT engine",  # over a stand-in for the GPU; its memory is shift
    "ring-engine": "TensorRT engine",  # over the graph of cut-ring
}
KINDS = tuple(COMPUTED_BY)


def folders_of_kinds(made: dict[str, Path], folder: Path) -> dict[str, Path]:
    """A folder of each kind to open. made: the folders that exist already."""
    return {
        **made,
        "device": made["ring"],
        "engine": fake_gpu.make_engine(made["shift"], folder / "engine"),
        "ring-engine": fake_gpu.make_engine(made["cut-ring"], folder / "ring-engine"),
    }
